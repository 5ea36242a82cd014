"""Ling-3.0 (bailing_hybrid), GLM-5 (glm5_next), Lara (lara_mini), Qwen4 (qwen4_exp).

Of these the linear-attention layers, norms, embeddings and plain feed-forwards are read; what else they have (indexers,
hyper-connections, n-gram embeddings, sliding windows' attention) is carried over unchanged, each kind by a rule of its
own.
"""

from __future__ import annotations

from .family import (
    ATTENTION,
    CONVS,
    DENSE,
    EXPERTS,
    FUSED_EXPERTS,
    MLA,
    MODEL,
    NORMS,
    Config,
    Family,
    Mixer,
    Rule,
    entries,
    shared,
)
from .kimi_linear import KDA_PROJECTIONS, LOW_RANK, ROUTER
from .qwen import (
    CENTRED,
    FUSED,
    GDN_SHARED,
    MTP,
    ONE_BY_ONE,
    QWEN_SAYS,
    REST,
    SPLIT,
    VISION,
    qwen_dims,
    qwen_mixer,
    text_config,
)

__all__ = ["BAILING_HYBRID", "GLM5_NEXT", "LARA_MINI", "QWEN4_EXP"]

LAYER = "model.layers.{i}."


def _first(config: Config, *keys: str) -> int | None:
    """The first of these settings that is there, of the text model or, without "linear_", of its linear attention."""
    inner = config.get("linear_attn_config")
    for key in keys:
        short = key.removeprefix("linear_")
        if short != key and isinstance(inner, dict) and isinstance(inner.get(short), int):
            return int(inner[short])
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def _kda_sizes(config: Config, heads: tuple[str, ...], dim: tuple[str, ...]) -> dict[str, int]:
    config = text_config(config)
    n, d = _first(config, *heads), _first(config, *dim)
    sizes = {"Hk": n, "Dk": d, "Dv": d, "R": 1}
    return {name: size for name, size in sizes.items() if size is not None}


def _kda(config: Config, heads: tuple[str, ...], dim: tuple[str, ...], eps: float, bound: float | None) -> Mixer:
    config = text_config(config)
    n, d = _first(config, *heads), _first(config, *dim)
    if n is None or d is None:
        raise KeyError(heads[0] if n is None else dim[0])
    return Mixer("kda", n, n, d, d, "sigmoid", config.get("rms_norm_eps", eps), bound)


def _renamed(table: dict[str, str], old: str, new: str) -> dict[str, str]:
    return {new if name == old else name: text for name, text in table.items()}


def _indexer(*names: str) -> Rule:
    start = r"model\.layers\.\d+\.self_attn\.indexer\."
    return Rule("sparse attention's indexer", start + ".*", tree=True, whole=((start, names),))


_LING_KDA = {
    **KDA_PROJECTIONS,
    **CONVS,
    "f_proj.weight": "f: Hk R Dk, E",
    "g_proj.weight": "z: Hk R Dv, E",
    "A_log": "A_log: Hk R",
    "dense.weight": "out: E, Hk R Dv",
}
_LING_MLA = {**_renamed(MLA, "o_proj.weight", "dense.weight"), "g_proj.weight": "mla_gate: n, E"}

# As transformers saves it, head_dim is the width of MLA's rotary part; in the release it is that of the linear layers.
_LING_SIZES = (("linear_num_heads", "num_attention_heads"), ("linear_head_dim", "head_dim"))

BAILING_HYBRID = Family(
    "bailing_hybrid",
    "Ling-3.0",
    ("bailing_hybrid",),
    (
        *entries(_LING_KDA, LAYER + "attention.", when="linear"),
        *entries(_LING_MLA, LAYER + "attention.", when="full"),
        *entries(DENSE, LAYER + "mlp."),
        *entries({"gate.weight": "router: X, E", "gate.expert_bias": "router_bias: X"}, LAYER + "mlp."),
        *entries(EXPERTS, LAYER + "mlp.experts.{e}."),
        *entries(shared("shared_experts"), LAYER + "mlp."),
        *entries(NORMS, LAYER),
        *entries(_renamed(MODEL, "model.embed_tokens.weight", "model.word_embeddings.weight")),
    ),
    lambda config: _kda_sizes(config, *_LING_SIZES),
    lambda config: _kda(
        config,
        *_LING_SIZES,
        1e-6,
        config.get("kda_lower_bound", -5.0) if config.get("kda_safe_gate", True) else None,
    ),
)

_GLM_SIZES = (("linear_num_heads",), ("linear_head_dim",))


def _glm_bound(config: Config) -> float | None:
    """The decay's lower bound; the release says it, if at all, beside the other settings of linear attention."""
    bound: float | None = config.get("linear_lower_bound", -5.0)
    inner = config.get("linear_attn_config")
    if isinstance(inner, dict):
        bound = inner.get("gate_lower_bound", bound)
        if bound is None and inner.get("safe_gate", True):
            bound = -5.0
    return bound


GLM5_NEXT = Family(
    "glm5_next",
    "GLM-5.3",
    ("glm5_next", "glm5_next_text"),
    (
        *entries(
            {**KDA_PROJECTIONS, **LOW_RANK, **CONVS, "A_log": "A_log: Hk R", "o_proj.weight": "out: E, Hk R Dv"},
            LAYER + "self_attn.",
            when="linear",
        ),
        *entries(MLA, LAYER + "self_attn.", when="full"),
        *entries(DENSE, LAYER + "mlp."),
        *entries(ROUTER, LAYER + "mlp."),
        *entries(EXPERTS, LAYER + "mlp.experts.{e}."),
        *entries(shared("shared_experts"), LAYER + "mlp."),
        *entries(NORMS, LAYER),
        *entries(MODEL),
    ),
    lambda config: _kda_sizes(config, *_GLM_SIZES),
    lambda config: _kda(config, *_GLM_SIZES, 1e-5, _glm_bound(text_config(config))),
    rules=(
        Rule(VISION.name, VISION.pattern),  # of other parts than Qwen's
        Rule("hyper-connections", r"model\.(layers\.\d+\.)?hc_.*", tree=True, every=True),
        _indexer(
            "index_kpool_compress_ape",
            "index_kpool_compress_gate",
            "k_norm.weight",
            "k_norm.bias",
            "weights_proj.weight",
            "wk.weight",
            "wq_b.weight",
        ),
    ),
    prefixes=("model.language_model.", "model.", ""),
)

LARA_MINI = Family(
    "lara_mini",
    "Lara-4-Mini",
    ("lara_mini",),
    (
        *entries(
            {
                "in_proj.weight": "(q Hk Dk | k Hk Dk | v Hk R Dv | z Hk R Dv | b Hk R | a Hk R), E",
                **_renamed(GDN_SHARED, "norm.weight", "out_norm.weight"),
            },
            LAYER + "linear_attn.",
        ),
        *entries(ATTENTION, LAYER + "self_attn."),
        *entries({"gate.weight": "router: X, E", **shared("shared_expert")}, LAYER + "mlp."),
        *entries(FUSED_EXPERTS, LAYER + "mlp.experts."),
        *entries(NORMS, LAYER),
        *entries(MODEL),
    ),
    qwen_dims,
    qwen_mixer,
    says=QWEN_SAYS,
    tied=True,
)

QWEN4_EXP = Family(
    "qwen4_exp",
    "Qwen4-Exp",
    ("qwen4_exp", "qwen4_exp_text"),
    (*entries(SPLIT, LAYER + "linear_attn."), *entries(GDN_SHARED, LAYER + "linear_attn."), *REST, *ONE_BY_ONE, *FUSED),
    qwen_dims,
    qwen_mixer,
    rules=(
        MTP,
        VISION,
        Rule(
            "hyper-connections",
            r"model\.(layers\.\d+\.\w+_hyper_connection|hyper_connection_mixer)\..*",
            tree=True,
            every=True,
            whole=(
                (
                    r"model\.(hyper_connection_mixer|layers\.\d+\.\w+_hyper_connection)\.",
                    ("hc_norm.weight", "input_mix_weight_down.weight", "input_mix_weight_up.weight"),
                ),
            ),
        ),
        _indexer("index_qk_proj.weight", "k_layernorm.weight", "q_layernorm.weight"),
        Rule("n-gram embeddings", r"model\.(layers\.\d+\.)?ple\..*", tree=True),
    ),
    prefixes=("model.language_model.", "model."),
    zero_centred=CENTRED,
    may_lack=lambda config, layer, linear: frozenset(("norm_1", "norm_2", "final_norm")),  # hyper-connections have them
    says=QWEN_SAYS,
)
