"""Ling-2.6, Ling-2.5 and Ring-2.5: lightning attention, which is GLA with a fixed decay for each head, and MLA.

Their config.json has the model_type of Ling-3.0, bailing_hybrid (architectures BailingMoeV2_5ForCausalLM); the tensors
tell the two apart. A linear layer has one projection for q, k, v, norms on q and k, rotary positions on a part of each
head, and an output norm over groups of heads; neither a convolution nor a beta. Its decay is no tensor: it follows from
the head's number and the layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .family import DENSE, EXPERTS, MLA, MODEL, NORMS, Config, Family, Mixer, entries, shared
from .qwen import text_config

__all__ = ["BAILING_GLA", "LightningMixer"]

LAYER = "model.layers.{i}."

_LINEAR = {
    "query_key_value.weight": "(q Hk Dk | k Hk Dk | v Hk R Dv), E",
    "query_layernorm.weight": "lin_q_norm: Dk",
    "key_layernorm.weight": "lin_k_norm: Dk",
    "g_proj.weight": "z: Hk R Dv, E",
    "g_norm.weight": "g_norm: Hk R Dv",
    "dense.weight": "out: E, Hk R Dv",
}
_MLA = {("dense.weight" if name == "o_proj.weight" else name): text for name, text in MLA.items()}


@dataclass(frozen=True)
class LightningMixer(Mixer):
    """What lightning attention computes, beyond its weights.

    rotary_dim, rope_theta: positions turn the first so many channels of a head. rope_scaling: its kind, where positions
    are scaled. norm_groups: parts of the output that are normalised apart. layers: of the model, for the decay.
    """

    rotary_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: str | None = None
    norm_groups: int = 1
    layers: int = 1


def _heads(config: Config) -> tuple[int, int]:
    """Heads and their width. Where head_dim is that of MLA's rotary part, the hidden size is divided by the heads."""
    heads = config.get("num_kv_heads_for_linear_attn") or config["num_attention_heads"]
    width = config.get("linear_head_dim") or config.get("head_dim")
    if width is None or (width == config.get("qk_rope_head_dim") and width * heads != config["hidden_size"]):
        width = config["hidden_size"] // heads
    return heads, width


def _dims(config: Config) -> dict[str, int]:
    try:
        heads, width = _heads(text_config(config))
    except (KeyError, TypeError, ZeroDivisionError):
        return {}
    return {"Hk": heads, "R": 1, "Dk": width, "Dv": width}


def _mixer(config: Config) -> LightningMixer:
    config = text_config(config)
    heads, width = _heads(config)
    rope: dict[str, Any] = {**config, **(config.get("rope_parameters") or {})}
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type")) or rope.get("rope_type")
    turned = int(width * rope["partial_rotary_factor"]) if config.get("linear_rope", True) else 0
    silu = config.get("use_linear_silu") or config.get("linear_silu")
    return LightningMixer(
        "gla",
        heads,
        heads,
        width,
        width,
        "linear_silu" if silu else "sigmoid",  # public implementations differ in what linear_silu applies to
        config["rms_norm_eps"],
        rotary_dim=turned,
        rope_theta=float(rope["rope_theta"]) if turned else 1.0,
        rope_scaling=None if kind in (None, "default") else str(kind),
        norm_groups=config["group_norm_size"],
        layers=config["num_hidden_layers"],
    )


def _may_lack(config: Config, layer: int, linear: bool) -> frozenset[str]:
    found = frozenset() if text_config(config).get("moe_router_enable_expert_bias", True) else {"router_bias"}
    return frozenset(found)


def _ruled_out(config: Config) -> dict[str, str]:
    if text_config(config).get("use_qk_norm") is False:
        return dict.fromkeys(("lin_q_norm", "lin_k_norm"), "use_qk_norm = false")
    return {}


BAILING_GLA = Family(
    "bailing_gla",
    "Ling-2.6",
    ("bailing_hybrid", "bailing_moe_v2_5"),
    (
        *entries(_LINEAR, LAYER + "attention.", when="linear"),
        *entries(_MLA, LAYER + "attention.", when="full"),
        *entries(DENSE, LAYER + "mlp."),
        *entries({"gate.weight": "router: X, E", "gate.expert_bias": "router_bias: X"}, LAYER + "mlp."),
        *entries(EXPERTS, LAYER + "mlp.experts.{e}."),
        *entries(shared("shared_experts"), LAYER + "mlp."),
        *entries(NORMS, LAYER),
        *entries({("model.word_embeddings.weight" if "embed" in n else n): text for n, text in MODEL.items()}),
    ),
    _dims,
    _mixer,
    may_lack=_may_lack,
    ruled_out=_ruled_out,
    conv_activation=False,
)
