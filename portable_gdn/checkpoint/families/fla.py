"""flash-linear-attention: Gated DeltaNet, KDA, GDN-2, as models ("model.layers.{i}.attn.") and as bare layers.

GDN-2 is a layer only in fla 0.6, without a model class: give its file a config.json with the layer's arguments and
model_type "gated_deltanet2". Names of earlier versions are read too: an unused ``D`` of Gated DeltaNet before March
2025, ``A`` and ``f_proj.1.bias`` of the first KDA, which are A_log and dt_bias.
"""

from __future__ import annotations

from typing import Any

from ..table import Entry
from .family import ATTENTION, CONVS, DENSE, Config, Family, Mixer, Rule, attention_dims, entries
from .kimi_linear import KDA_PROJECTIONS
from .olmo_hybrid import GDN_PROJECTIONS

__all__ = ["GATED_DELTANET", "GATED_DELTANET2", "KDA"]

LAYER = "model.layers.{i}."

CONV_BIASES = {
    "q_conv1d.bias": "conv_q_bias: Hk Dk",
    "k_conv1d.bias": "conv_k_bias: Hk Dk",
    "v_conv1d.bias": "conv_v_bias: Hk R Dv",
}

_LOW_RANK = {
    "f_proj.0.weight": "f_a: r, E",
    "f_proj.1.weight": "f_b: Hk R Dk, r",
    "g_proj.0.weight": "g_a: s, E",
    "g_proj.1.weight": "g_b: Hk R Dv, s",
    "o_proj.weight": "out: E, Hk R Dv",
}
_GATE_BIAS = {"g_proj.1.bias": "g_bias: Hk R Dv"}

_KDA = {**KDA_PROJECTIONS, **_LOW_RANK, **CONVS, **CONV_BIASES, "A_log": "A_log: Hk R"}
_LEGACY_KDA = {"A": "A_log: Hk R", "f_proj.1.bias": "dt_bias_k: Hk R Dk"}

_GDN2 = {
    **_LOW_RANK,
    **CONVS,
    **CONV_BIASES,
    "q_proj.weight": "q: Hk Dk, E",
    "k_proj.weight": "k: Hk Dk, E",
    "v_proj.weight": "v: Hk R Dv, E",
    "f_proj.1.weight": "f_b_2: Hk Dk, r",
    "b_proj.weight": "erase: Hk Dk, E",
    "w_proj.weight": "write: Hk R Dv, E",
    "A_log": "A_log_2: Hk",
    "dt_bias": "dt_bias_2: Hk Dk",
    "o_norm.weight": "o_norm: Dv",
}

_NORMS = {"attn_norm.weight": "norm_1: E", "mlp_norm.weight": "norm_2: E"}
_MODEL = {
    "model.embeddings.weight": "embed: V, E",
    "model.norm.weight": "final_norm: E",
    "lm_head.weight": "head: V, E",
}
_BIASES = {"q_proj.bias": "attn_q_bias: H A", "k_proj.bias": "attn_k_bias: Hkv D", "v_proj.bias": "attn_v_bias: Hkv D"}


def _layer(table: dict[str, str], zeros: bool = False) -> tuple[Entry, ...]:
    """Rows of a mixer inside a model, and of one alone."""
    return (*entries(table, LAYER + "attn.", when="linear", zeros=zeros), *entries(table, layer=0, zeros=zeros))


_REST = (
    *entries({**ATTENTION, **_BIASES}, LAYER + "attn.", when="full"),
    *entries(DENSE, LAYER + "mlp."),
    *entries(_NORMS, LAYER),
    *entries(_MODEL),
)


def _dims(config: Config) -> dict[str, int]:
    found: dict[str, Any] = {}
    n, d = config.get("num_heads"), config.get("head_dim")
    if isinstance(n, int) and n > 0:
        found["Hk"], found["R"] = n, (config.get("num_v_heads") or n) // n
    if isinstance(d, int):
        expand = config.get("expand_v")
        expand = _EXPAND.get(config.get("model_type", ""), 1) if expand is None else expand
        found["Dk"], found["Dv"] = d, int(d * expand)
    attention = config.get("attn")
    first = attention[0] if isinstance(attention, list) and attention else attention
    if isinstance(first, dict):
        found.update(H=first.get("num_heads"), Hkv=first.get("num_kv_heads") or first.get("num_heads"))
    else:
        found.update(attention_dims(config))
    return {dim: size for dim, size in found.items() if isinstance(size, int)}


_EXPAND = {"gated_deltanet": 2}


def _mixer(kind: str) -> object:
    def settings(config: Config) -> Mixer:
        sizes = _dims(config)
        gate = (config.get("output_gate_activation") or "swish") if kind == "gdn" else "sigmoid"
        if kind == "gdn" and not config.get("use_gate", True):
            gate = None
        return Mixer(
            kind,
            sizes["Hk"],
            sizes["Hk"] * sizes["R"],
            sizes["Dk"],
            sizes["Dv"],
            "silu" if gate == "swish" else gate,
            config.get("norm_eps", 1e-6 if "model_type" in config and kind != "gdn2" else 1e-5),
            (config.get("lower_bound") or -5.0) if config.get("safe_gate") else None,
            2.0 if config.get("allow_neg_eigval") else 1.0,
        )

    return settings


def _attention(config: Config, layer: int) -> Config:
    """The settings of a layer of full attention; those of all where the layer is not named."""
    found = config.get("attn")
    parts = [part for part in (found if isinstance(found, list) else [found]) if isinstance(part, dict)]
    return next((part for part in parts if layer in (part.get("layers") or ())), parts[0] if len(parts) == 1 else {})


def _may_lack(config: Config, layer: int, linear: bool) -> frozenset[str]:
    found: list[str] = [] if config.get("conv_bias") else ["conv_q_bias", "conv_k_bias", "conv_v_bias"]
    attention = _attention(config, layer)
    found += [] if attention.get("qkv_bias") else ["attn_q_bias", "attn_k_bias", "attn_v_bias"]
    found += [] if attention.get("qk_norm") else ["attn_q_norm", "attn_k_norm"]
    return frozenset(found)


def _ruled_out(config: Config) -> dict[str, str]:
    found = {}
    if config.get("use_short_conv") is False:
        found.update(dict.fromkeys(("conv_q", "conv_k", "conv_v"), "use_short_conv = false"))
        found.update(dict.fromkeys(("conv_q_bias", "conv_k_bias", "conv_v_bias"), "use_short_conv = false"))
    if config.get("use_gate") is False:
        found["z"] = "use_gate = false"
    return found


def _family(name: str, title: str, types: tuple[str, ...], kind: str, rows: tuple[Entry, ...], *rules: Rule) -> Family:
    return Family(
        name,
        title,
        types,
        (*rows, *_REST),
        _dims,
        _mixer(kind),  # type: ignore[arg-type]
        rules,
        may_lack=_may_lack,
        ruled_out=_ruled_out,
        conv_activation=False,
    )


GATED_DELTANET = _family(
    "gated_deltanet",
    "FLA Gated DeltaNet",
    ("gated_deltanet",),
    "gdn",
    _layer({**GDN_PROJECTIONS, **CONV_BIASES}),
    Rule("unused by the model (attn.D)", r"(model\.layers\.\d+\.attn\.)?D"),
)
KDA = _family("kda", "FLA KDA", ("kda",), "kda", (*_layer(_KDA), *_layer(_GATE_BIAS, zeros=True), *_layer(_LEGACY_KDA)))
GATED_DELTANET2 = _family(
    "gated_deltanet2",
    "FLA GDN-2",
    ("gated_deltanet2", "gdn2"),
    "gdn2",
    (*_layer(_GDN2), *_layer(_GATE_BIAS, zeros=True)),
)
