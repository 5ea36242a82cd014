"""Qwen3-Next, and Qwen3.5, 3.6, 3.8 (model_type qwen3_5 and qwen3_5_moe, text alone or with vision).

Qwen3-Next interleaves q, k, v, z by key head in one projection, and b, a in another; Qwen3.5 has them apart. Both have
convolutions, decay and norms alike. Experts are published one by one (Qwen3-Next, FP8) or fused (Qwen3.5 in bfloat16).
"""

from __future__ import annotations

from typing import Any

from .family import (
    ATTENTION,
    DENSE,
    EXPERTS,
    FUSED_EXPERTS,
    MODEL,
    NORMS,
    SAYS,
    Config,
    Family,
    Mixer,
    Rule,
    attention_dims,
    entries,
    heads,
    shared,
)

__all__ = ["GDN_SHARED", "QWEN3_5", "QWEN3_NEXT", "QWEN_SAYS", "SPLIT", "qwen_dims", "qwen_mixer"]

LAYER = "model.layers.{i}."

GDN_SHARED = {
    "conv1d.weight": "(conv_q Hk Dk | conv_k Hk Dk | conv_v Hk R Dv), 1, W",
    "A_log": "A_log: Hk R",
    "dt_bias": "dt_bias: Hk R",
    "norm.weight": "o_norm: Dv",
    "out_proj.weight": "out: E, Hk R Dv",
}

INTERLEAVED = {
    "in_proj_qkvz.weight": "Hk (q Dk | k Dk | v R Dv | z R Dv), E",
    "in_proj_ba.weight": "Hk (b R | a R), E",
}

SPLIT = {
    "in_proj_qkv.weight": "(q Hk Dk | k Hk Dk | v Hk R Dv), E",
    "in_proj_z.weight": "z: Hk R Dv, E",
    "in_proj_b.weight": "b: Hk R, E",
    "in_proj_a.weight": "a: Hk R, E",
}

REST = (
    *entries(ATTENTION, LAYER + "self_attn."),
    *entries(DENSE, LAYER + "mlp."),
    *entries({"gate.weight": "router: X, E", "shared_expert_gate.weight": "shared_switch: 1, E"}, LAYER + "mlp."),
    *entries(shared("shared_expert"), LAYER + "mlp."),
    *entries(NORMS, LAYER),
    *entries(MODEL),
)
ONE_BY_ONE = entries(EXPERTS, LAYER + "mlp.experts.{e}.")
FUSED = entries(FUSED_EXPERTS, LAYER + "mlp.experts.")

QWEN_SAYS = {**SAYS, "D": ("head_dim",), "S": ("shared_expert_intermediate_size",)}

CENTRED = ("norm_1", "norm_2", "final_norm", "attn_q_norm", "attn_k_norm")


def text_config(config: Config) -> Config:
    """The part of a configuration that describes the text model."""
    inner: Any = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def qwen_dims(config: Config) -> dict[str, int]:
    """Sizes that the shapes do not tell."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    config = text_config(config)
    return {**heads(config, *names), **attention_dims(config)}


def qwen_mixer(config: Config) -> Mixer:
    """What the linear layers compute."""
    config = text_config(config)
    gate = config.get("output_gate_type") or "silu"
    return Mixer(
        "gdn",
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        gate="silu" if gate == "swish" else gate,
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


MTP = Rule("multi-token prediction", r"mtp\..*")
_BOTH = (".weight", ".bias")
VISION = Rule(
    "vision",
    r"model\.visual\..*|visual\..*",
    whole=(
        (
            r"(model\.)?visual\.",
            (
                "pos_embed.weight",
                *(
                    f"{n}{end}"
                    for n in ("patch_embed.proj", "merger.norm", "merger.linear_fc1", "merger.linear_fc2")
                    for end in _BOTH
                ),
            ),
        ),
        (
            r"(model\.)?visual\.blocks\.\d+\.",
            tuple(
                f"{n}{end}"
                for n in ("attn.proj", "attn.qkv", "mlp.linear_fc1", "mlp.linear_fc2", "norm1", "norm2")
                for end in _BOTH
            ),
        ),
    ),
)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3-Next",
    ("qwen3_next",),
    (
        *entries(INTERLEAVED, LAYER + "linear_attn."),
        *entries(GDN_SHARED, LAYER + "linear_attn."),
        *REST,
        *ONE_BY_ONE,
        *FUSED,
    ),
    qwen_dims,
    qwen_mixer,
    rules=(MTP,),
    zero_centred=CENTRED,
    says=QWEN_SAYS,
)

QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3.5, 3.6, 3.8",
    ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    (*entries(SPLIT, LAYER + "linear_attn."), *entries(GDN_SHARED, LAYER + "linear_attn."), *REST, *FUSED, *ONE_BY_ONE),
    qwen_dims,
    qwen_mixer,
    rules=(MTP, VISION),
    prefixes=("model.language_model.", "model."),
    zero_centred=CENTRED,
    says=QWEN_SAYS,
)
