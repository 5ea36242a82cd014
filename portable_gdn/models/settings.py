"""What a decoder is like: records of plain values, hashable, so that they can be static in a compiled function."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionSettings", "DecoderSettings", "ExpertSettings", "MixerSettings"]


@dataclass(frozen=True)
class MixerSettings:
    """A linear-attention layer, one of ``portable_gdn.layers``; the names are those of its options."""

    kind: str
    """"gdn" is GatedDeltaNet."""
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


@dataclass(frozen=True)
class AttentionSettings:
    """Softmax attention over all tokens before, with fewer heads of keys and values than of queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Channels of a head that are rotated, the first ones; even, at most head_dim."""
    rope_theta: float
    gated: bool = True
    """Whether q_proj also makes a gate, of each head [query | gate], whose sigmoid scales the output."""


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture of experts beside one that every token passes through."""

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int
    renormalised: bool
    """Whether the weights of a token's experts are divided by their sum."""


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
    attention: AttentionSettings | None
    experts: ExpertSettings | None
