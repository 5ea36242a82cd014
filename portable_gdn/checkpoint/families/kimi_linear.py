"""Kimi-Linear: KDA with low-rank gates, MLA without positions, a dense first layer, experts w1, w2, w3."""

from __future__ import annotations

from typing import Any

from .family import CONVS, DENSE, MLA, MODEL, NORMS, Config, Family, Mixer, Rule, entries, shared

__all__ = ["KDA_PROJECTIONS", "KIMI_LINEAR", "LOW_RANK", "ROUTER", "kda_dims", "kda_mixer", "undescribed"]

LAYER = "model.layers.{i}."

KDA_PROJECTIONS = {
    "q_proj.weight": "q: Hk Dk, E",
    "k_proj.weight": "k: Hk Dk, E",
    "v_proj.weight": "v: Hk R Dv, E",
    "b_proj.weight": "b: Hk R, E",
    "dt_bias": "dt_bias_k: Hk R Dk",
    "o_norm.weight": "o_norm: Dv",
}

LOW_RANK = {
    "f_a_proj.weight": "f_a: r, E",
    "f_b_proj.weight": "f_b: Hk R Dk, r",
    "g_a_proj.weight": "g_a: s, E",
    "g_b_proj.weight": "g_b: Hk R Dv, s",
}

KDA = {
    **KDA_PROJECTIONS,
    **LOW_RANK,
    **CONVS,
    # Released files have four dims; files of its successor one.
    "A_log": ("A_log: 1, 1, Hk R, 1", "A_log: Hk R"),
    "o_proj.weight": "out: E, Hk R Dv",
}

EXPERT = {"w1.weight": "expert_gate: M, E", "w3.weight": "expert_up: M, E", "w2.weight": "expert_down: E, M"}
ROUTER = {"gate.weight": "router: X, E", "gate.e_score_correction_bias": "router_bias: X"}


def _linear(config: Config) -> dict[str, Any]:
    inner = config.get("linear_attn_config")
    if isinstance(inner, dict):
        return {"heads": inner.get("num_heads"), "dim": inner.get("head_dim")}
    return {"heads": config.get("linear_num_heads"), "dim": config.get("linear_head_dim")}


def kda_dims(config: Config) -> dict[str, int]:
    """Sizes that the shapes do not tell, from the text model's configuration."""
    found = _linear(config)
    sizes = {"Hk": found["heads"], "Dk": found["dim"], "Dv": found["dim"], "R": 1}
    return {dim: n for dim, n in sizes.items() if isinstance(n, int)}


def kda_mixer(config: Config) -> Mixer:
    """What the linear layers compute."""
    n, d = _linear(config)["heads"], _linear(config)["dim"]
    bound = (config.get("linear_attn_config") or {}).get("gate_lower_bound")
    return Mixer("kda", n, n, d, d, "sigmoid", config.get("rms_norm_eps", 1e-6), bound)


def undescribed(config: Config) -> frozenset[str]:
    """The pieces of the feed-forward, if the configuration says nothing of one, so that none can be missed."""
    if any(key in config for key in ("intermediate_size", "moe_intermediate_size", "num_experts")):
        return frozenset()
    kinds = ("mlp_gate", "mlp_up", "mlp_down", "router", "router_bias", "shared_gate", "shared_up", "shared_down")
    return frozenset((*kinds, "expert_gate", "expert_up", "expert_down"))


KIMI_LINEAR = Family(
    "kimi_linear",
    "Kimi-Linear",
    ("kimi_linear",),
    (
        *entries(KDA, LAYER + "self_attn.", when="linear"),
        *entries(MLA, LAYER + "self_attn.", when="full"),
        *entries(DENSE, LAYER + "mlp."),
        *entries(DENSE, LAYER + "block_sparse_moe."),  # what transformers saves for the dense first layer
        *entries(EXPERT, LAYER + "block_sparse_moe.experts.{e}."),
        *entries(ROUTER, LAYER + "block_sparse_moe."),
        *entries(shared("shared_experts"), LAYER + "block_sparse_moe."),
        *entries(NORMS, LAYER),
        *entries(MODEL),
    ),
    kda_dims,
    kda_mixer,
    rules=(Rule("multi-token prediction", r"mtp\..*"),),
    prefixes=("model.", "language_model.model."),
    may_lack=lambda config, layer, linear: undescribed(config),
)
