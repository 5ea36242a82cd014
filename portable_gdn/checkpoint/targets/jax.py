"""Our own parameter tree: what ``--to jax`` writes, and the state of the NNX layers.

A leaf's path is its name with dots. As in Flax: a projection has ``kernel`` [in, out], a depthwise convolution
``kernel`` [W, 1, channels], a norm ``scale``. Experts are stacked, [X, in, out]. q, k, v and the gates are apart, so
that heads can be sharded along one axis of each.
"""

from __future__ import annotations

from ..families.family import Family
from ..table import Dialect, Entry, entries

__all__ = ["jax_dialect"]

_MIXER = {
    "q_proj.kernel": "q: E, Hk Dk",
    "k_proj.kernel": "k: E, Hk Dk",
    "v_proj.kernel": "v: E, Hk R Dv",
    "q_conv1d.kernel": "conv_q: W, 1, Hk Dk",
    "k_conv1d.kernel": "conv_k: W, 1, Hk Dk",
    "v_conv1d.kernel": "conv_v: W, 1, Hk R Dv",
    "q_conv1d.bias": "conv_q_bias: Hk Dk",
    "k_conv1d.bias": "conv_k_bias: Hk Dk",
    "v_conv1d.bias": "conv_v_bias: Hk R Dv",
    "a_proj.kernel": "a: E, Hk R",
    "b_proj.kernel": ("b: E, Hk R", "erase: E, Hk Dk"),
    "w_proj.kernel": "write: E, Hk R Dv",
    "f_proj.kernel": "f: E, Hk R Dk",
    "f_a_proj.kernel": "f_a: E, r",
    "f_b_proj.kernel": ("f_b: r, Hk R Dk", "f_b_2: r, Hk Dk"),
    "A_log": ("A_log: Hk R", "A_log_2: Hk"),
    "dt_bias": ("dt_bias: Hk R", "dt_bias_k: Hk R Dk", "dt_bias_2: Hk Dk"),
    "g_proj.kernel": "z: E, Hk R Dv",
    "g_a_proj.kernel": "g_a: E, s",
    "g_b_proj.kernel": "g_b: s, Hk R Dv",
    "g_b_proj.bias": "g_bias: Hk R Dv",
    "o_norm.scale": "o_norm: Dv",
    "o_proj.kernel": "out: Hk R Dv, E",
    "q_norm.scale": "lin_q_norm: Dk",
    "k_norm.scale": "lin_k_norm: Dk",
    "g_norm.scale": "g_norm: Hk R Dv",
}

_ATTENTION = {
    "q_proj.kernel": ("attn_q: E, H A", "mla_q: E, n"),
    "k_proj.kernel": "attn_k: E, Hkv D",
    "v_proj.kernel": "attn_v: E, Hkv D",
    "o_proj.kernel": ("attn_o: H D, E", "mla_o: n, E"),
    "q_proj.bias": "attn_q_bias: H A",
    "k_proj.bias": "attn_k_bias: Hkv D",
    "v_proj.bias": "attn_v_bias: Hkv D",
    "q_norm.scale": ("attn_q_norm: n", "mla_q_norm: n"),
    "k_norm.scale": "attn_k_norm: n",
    "q_a_proj.kernel": "mla_q_a: E, n",
    "q_b_proj.kernel": "mla_q_b: m, n",
    "kv_a_proj.kernel": "mla_kv_a: E, n",
    "kv_norm.scale": "mla_kv_norm: n",
    "kv_b_proj.kernel": "mla_kv_b: m, n",
    "g_proj.kernel": "mla_gate: E, n",
}

_MLP = {
    "gate_proj.kernel": "mlp_gate: E, F",
    "up_proj.kernel": "mlp_up: E, F",
    "down_proj.kernel": "mlp_down: F, E",
    "router.kernel": "router: E, X",
    "router.bias": "router_bias: X",
    "experts.gate_proj": "expert_gate: @e, E, M",
    "experts.up_proj": "expert_up: @e, E, M",
    "experts.down_proj": "expert_down: @e, M, E",
    "shared_expert.gate_proj.kernel": "shared_gate: E, S",
    "shared_expert.up_proj.kernel": "shared_up: E, S",
    "shared_expert.down_proj.kernel": "shared_down: S, E",
    "shared_expert_gate.kernel": "shared_switch: E, 1",
}

_NORMS = {
    "input_norm.scale": "norm_1: E",
    "mlp_norm.scale": "norm_2: E",
    "mixer_post_norm.scale": "post_norm_1: E",
    "mlp_post_norm.scale": "post_norm_2: E",
}

_MODEL = {"embed.embedding": "embed: V, E", "norm.scale": "final_norm: E", "lm_head.kernel": "head: E, V"}

_PADDING = {"A_log_padding": "A_log_rest: pad"}  # no part of the layer: only the way back needs it

TABLE: tuple[Entry, ...] = (
    *entries(_MIXER, "layers.{i}.mixer."),
    *entries(_ATTENTION, "layers.{i}.attention."),
    *entries(_MLP, "layers.{i}.mlp."),
    *entries(_NORMS, "layers.{i}."),
    *entries(_PADDING, "layers.{i}."),
    *entries(_MODEL),
)


def jax_dialect(family: Family) -> Dialect:
    """The tree as far as a family has pieces for it: several families have different layouts under one name."""
    pieces = {piece for entry in family.table for piece in entry.layout.pieces}
    return Dialect("jax", tuple(entry for entry in TABLE if pieces.issuperset(entry.layout.pieces)))
