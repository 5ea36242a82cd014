"""The settings of a decoder: records of plain values, which are hashable and so can be static in compiled functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["AttentionSettings", "DecoderSettings", "ExpertSettings", "LatentSettings", "MixerSettings"]


@dataclass(frozen=True)
class MixerSettings:
    """A linear-attention layer, one of ``portable_gdn.layers``; the names are those of its options."""

    kind: str
    """"gdn" is GatedDeltaNet, "kda" KimiDeltaAttention, "gdn2" GatedDeltaNet2."""
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    gate: str | None
    """Activation of the output gate: "silu", "sigmoid" or None."""
    norm_eps: float
    beta_scale: float = 1.0
    conv_size: int = 4
    conv_bias: bool = False
    decay_rank: int | None = None
    gate_rank: int | None = None
    gate_bias: bool = False
    lower_bound: float | None = None


@dataclass(frozen=True)
class AttentionSettings:
    """Softmax attention over all tokens before, with fewer heads of keys and values than of queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Channels of a head that are rotated, the first ones; even, at most head_dim; 0 is no positions."""
    rope_theta: float
    gated: bool
    """Whether q_proj also makes a gate, for each head [query | gate], whose sigmoid scales the output."""
    qk_norm: Literal["head", "whole"] | None
    """What norms of q and k are over: the channels of a head, or those of all heads; None is no norms."""
    norm_eps: float
    """What these norms add."""
    bias: bool = False
    """Whether q_proj, k_proj and v_proj have biases."""
    window: int | None = None
    """How many tokens a token sees, itself among them; None is all before it."""


@dataclass(frozen=True)
class LatentSettings:
    """Latent attention (MLA) without positions: keys and values of all heads come from one latent vector a token, and a
    part of each key is shared by all heads."""

    num_heads: int
    plain_dim: int
    """Channels of a key that are a head's own."""
    shared_dim: int
    """Channels of a key that all heads share; in other models they are those that are rotated."""
    value_dim: int
    rank: int
    """Channels of the latent vector."""
    query_rank: int | None
    """Width between the two factors of the queries' projection; None is one matrix."""
    norm_eps: float
    """What the norms between factors add."""


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture of experts beside one that every token passes through."""

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int
    """Width of the expert that every token passes through; 0 is none."""
    shared_gate: bool
    """Whether that one's output is scaled by the sigmoid of a projection."""
    renormalised: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights: "sigmoid" has a bias, which counts in the choice of experts only."""
    groups: int = 1
    groups_used: int = 1
    """In how many of the groups a token's experts may be: those with the largest sum of two scores."""
    scale: float = 1.0
    """What the weights are multiplied by at last."""


@dataclass(frozen=True)
class DecoderSettings:
    """A whole model. Layer i is linear attention or softmax attention, then a dense MLP or a mixture of experts."""

    vocabulary: int
    hidden_size: int
    linear: tuple[bool, ...]
    """For each layer, whether its attention is linear."""
    dense: tuple[bool, ...]
    """For each layer, whether its MLP is dense."""
    intermediate_size: int
    """Width of the dense MLPs."""
    norm_eps: float
    zero_centred: bool
    """Whether norms multiply by 1 + scale. The mixers' own output norms multiply by scale always."""
    tied: bool
    """Whether the head is the embedding."""
    mixer: MixerSettings | None
    attention: AttentionSettings | LatentSettings | None
    experts: ExpertSettings | None
    post_norm: bool = False
    """Whether layers of softmax attention have their norms after attention and MLP, before these are added."""
