"""OLMo-Hybrid: Gated DeltaNet under flash-linear-attention's names, beta up to 2, o_norm's eps fixed at 1e-5."""

from __future__ import annotations

from .family import ATTENTION, CONVS, DENSE, MODEL, SAYS, Config, Family, Mixer, attention_dims, entries, heads

__all__ = ["GDN_PROJECTIONS", "OLMO_HYBRID"]

LAYER = "model.layers.{i}."

GDN_PROJECTIONS = {
    "q_proj.weight": "q: Hk Dk, E",
    "k_proj.weight": "k: Hk Dk, E",
    "v_proj.weight": "v: Hk R Dv, E",
    "g_proj.weight": "z: Hk R Dv, E",
    "a_proj.weight": "a: Hk R, E",
    "b_proj.weight": "b: Hk R, E",
    **CONVS,
    "A_log": "A_log: Hk R",
    "dt_bias": "dt_bias: Hk R",
    "o_norm.weight": "o_norm: Dv",
    "o_proj.weight": "out: E, Hk R Dv",
}

NORMS = {
    "attention_layer_norm.weight": "norm_1: E",  # linear layers: before the mixer and before the feed-forward
    "post_attention_layernorm.weight": "post_norm_1: E",  # full layers: after each
    "post_feedforward_layernorm.weight": "post_norm_2: E",
}


def _dims(config: Config) -> dict[str, int]:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return {**heads(config, *names), **attention_dims(config)}


def _mixer(config: Config) -> Mixer:
    return Mixer(
        "gdn",
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        norm_eps=1e-5,
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )


def _may_lack(config: Config, layer: int, linear: bool) -> frozenset[str]:
    return frozenset(("post_norm_1", "post_norm_2") if linear else ("norm_1", "norm_2"))


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OLMo-Hybrid",
    ("olmo_hybrid",),
    (
        *entries(GDN_PROJECTIONS, LAYER + "linear_attn."),
        *entries(ATTENTION, LAYER + "self_attn."),
        *entries(DENSE, LAYER + "mlp."),
        *entries(NORMS, LAYER),
        *entries({"feedforward_layer_norm.weight": "norm_2: E"}, LAYER, when="linear"),
        # transformers' save_pretrained (5.24) calls this norm of full layers so, too, and reads it back
        *entries({"feedforward_layer_norm.weight": "post_norm_1: E"}, LAYER, when="full"),
        *entries(MODEL),
    ),
    _dims,
    _mixer,
    may_lack=_may_lack,
    says={**SAYS, "D": ("head_dim",)},
    chunked=("conv_q", "conv_k", "conv_v"),
)
