"""What a family's table says, and the rows that many families share.

Dims: E hidden, Hk key heads, R value heads per key head, Dk and Dv their widths, W taps of the short convolution; H,
Hkv, D attention heads, key-value heads, their width, A a query head's rows (twice D where an output gate stands beside
it); F, M, S widths of the dense, expert and shared feed-forward, X experts, V vocabulary. Words in lower case differ by
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..table import Entry, entries

__all__ = [
    "ATTENTION",
    "CONVS",
    "DENSE",
    "EXPERTS",
    "FUSED_EXPERTS",
    "KEEP_FLOAT32",
    "MIXER_PIECES",
    "MLA",
    "Family",
    "Mixer",
    "Rule",
    "entries",
    "heads",
]

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Mixer:
    """What a linear-attention layer computes, beyond its weights.

    kind: "gdn", "kda", "gdn2" or "gla". gate: activation of the output gate ("silu", "sigmoid"), None for a norm alone.
    lower_bound: of the bounded decay gate; None is the softplus gate. beta_scale: 2 allows negative eigenvalues.
    """

    kind: str
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    gate: str | None = "silu"
    norm_eps: float = 1e-6
    lower_bound: float | None = None
    beta_scale: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """Tensors that a port carries over unchanged.

    tree: into the target beside the others, else into the side file. every: every layer has them; those of other rules
    only some layers may have, but all of these the same ones. whole: beginnings of names, as regular expressions, and
    what must follow each that is there.
    """

    name: str
    pattern: str
    tree: bool = False
    every: bool = False
    whole: tuple[tuple[str, tuple[str, ...]], ...] = ()


def _nothing(config: Config, layer: int, linear: bool) -> frozenset[str]:
    return frozenset()


def _nothing_ruled_out(config: Config) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Family:
    """A model family as its checkpoints are.

    table: rows with "model." before what ``prefixes`` may replace.
    rules: what is carried over, by regular expressions on names with "model." in front.
    dims: sizes that the configuration must tell, since shapes do not.
    mixer: what the linear layers compute.
    zero_centred: which norms multiply by 1 + their weight.
    may_lack: pieces of a layer (its number, whether it is linear) that the configuration allows to be absent; of all
        others that the table has for such a layer, none may be (``completeness``).
    ruled_out: pieces that the configuration says no layer has, each with the setting that says so.
    says: sizes of dims that the configuration tells and shapes tell too, by its keys: they must agree.
    tied: whether the head is the embedding where the configuration does not say.
    conv_activation: whether the short convolution's activation is the configuration's hidden_act; else it is SiLU.
    chunked: pieces of a layer that transformers holds as one tensor, in this order, and saves in equal chunks whatever
        their widths (``regrouping``).
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    table: tuple[Entry, ...]
    dims: Callable[[Config], dict[str, int]]
    mixer: Callable[[Config], Mixer]
    rules: tuple[Rule, ...] = ()
    prefixes: tuple[str, ...] = ("model.",)
    zero_centred: tuple[str, ...] = ()
    may_lack: Callable[[Config, int, bool], frozenset[str]] = _nothing
    ruled_out: Callable[[Config], Mapping[str, str]] = _nothing_ruled_out
    says: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SAYS)
    tied: bool = False
    conv_activation: bool = True
    chunked: tuple[str, ...] = ()


SAYS: Mapping[str, tuple[str, ...]] = {
    "E": ("hidden_size",),
    "V": ("vocab_size",),
    "W": ("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_size"),
    "X": ("num_experts", "n_routed_experts", "num_local_experts"),
    "F": ("intermediate_size",),
    "M": ("moe_intermediate_size",),
}
"""Keys of a configuration that tell what shapes tell too. What "head_dim" means differs by family."""

# What stays float32 whatever --dtype says, where it is float32.
KEEP_FLOAT32 = frozenset(
    (
        "A_log",
        "A_log_rest",
        "dt_bias",
        "dt_bias_k",
        "A_log_2",
        "dt_bias_2",
        "o_norm",
        "norm_1",
        "norm_2",
        "post_norm_1",
        "post_norm_2",
        "final_norm",
        "attn_q_norm",
        "attn_k_norm",
        "router_bias",
        "mla_q_norm",
        "mla_kv_norm",
        "lin_q_norm",
        "lin_k_norm",
        "g_norm",
    )
)

CONVS = {
    "q_conv1d.weight": "conv_q: Hk Dk, 1, W",
    "k_conv1d.weight": "conv_k: Hk Dk, 1, W",
    "v_conv1d.weight": "conv_v: Hk R Dv, 1, W",
}

ATTENTION = {
    "q_proj.weight": "attn_q: H A, E",
    "k_proj.weight": "attn_k: Hkv D, E",
    "v_proj.weight": "attn_v: Hkv D, E",
    "o_proj.weight": "attn_o: E, H D",
    "q_norm.weight": "attn_q_norm: n",
    "k_norm.weight": "attn_k_norm: n",
}

MLA = {
    "q_proj.weight": "mla_q: n, E",
    "q_a_proj.weight": "mla_q_a: n, E",
    "q_a_layernorm.weight": "mla_q_norm: n",
    "q_b_proj.weight": "mla_q_b: n, m",
    "kv_a_proj_with_mqa.weight": "mla_kv_a: n, E",
    "kv_a_layernorm.weight": "mla_kv_norm: n",
    "kv_b_proj.weight": "mla_kv_b: n, m",
    "o_proj.weight": "mla_o: E, n",
}

DENSE = {
    "gate_proj.weight": "mlp_gate: F, E",
    "up_proj.weight": "mlp_up: F, E",
    "down_proj.weight": "mlp_down: E, F",
}

EXPERTS = {
    "gate_proj.weight": "expert_gate: M, E",
    "up_proj.weight": "expert_up: M, E",
    "down_proj.weight": "expert_down: E, M",
}

FUSED_EXPERTS = {
    "gate_up_proj": "@e, (expert_gate M | expert_up M), E",
    "down_proj": "expert_down: @e, E, M",
}


def shared(name: str) -> dict[str, str]:
    """Rows of the shared expert."""
    return {
        f"{name}.gate_proj.weight": "shared_gate: S, E",
        f"{name}.up_proj.weight": "shared_up: S, E",
        f"{name}.down_proj.weight": "shared_down: E, S",
    }


MODEL = {
    "model.embed_tokens.weight": "embed: V, E",
    "model.norm.weight": "final_norm: E",
    "lm_head.weight": "head: V, E",
}

NORMS = {"input_layernorm.weight": "norm_1: E", "post_attention_layernorm.weight": "norm_2: E"}

MIXER_PIECES = frozenset(
    (
        "q",
        "k",
        "v",
        "z",
        "b",
        "a",
        "conv_q",
        "conv_k",
        "conv_v",
        "conv_q_bias",
        "conv_k_bias",
        "conv_v_bias",
        "A_log",
        "dt_bias",
        "dt_bias_k",
        "A_log_2",
        "dt_bias_2",
        "o_norm",
        "out",
        "f",
        "f_a",
        "f_b",
        "f_b_2",
        "g_a",
        "g_b",
        "g_bias",
        "erase",
        "write",
        "lin_q_norm",
        "lin_k_norm",
        "g_norm",
    )
)
"""Pieces of linear-attention layers: what is ported between families that share nothing else."""


def heads(config: Config, keys: str, values: str, key_dim: str, value_dim: str) -> dict[str, int]:
    """Sizes of the linear layers, from the configuration's names of them; what it does not say is left out."""
    found: dict[str, int] = {}
    if isinstance(config.get(keys), int):
        found["Hk"] = config[keys]
        if isinstance(config.get(values), int) and config[keys] > 0:
            found["R"] = config[values] // config[keys]
    for dim, name in (("Dk", key_dim), ("Dv", value_dim)):
        if isinstance(config.get(name), int):
            found[dim] = config[name]
    return found


def attention_dims(config: Config) -> dict[str, int]:
    """Heads of the full-attention layers, as far as the configuration says."""
    names = {"H": "num_attention_heads", "Hkv": "num_key_value_heads"}
    return {dim: config[name] for dim, name in names.items() if isinstance(config.get(name), int)}
