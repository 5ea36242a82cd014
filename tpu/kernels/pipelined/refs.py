"""The references of the pipelined forward kernel, by name; the same trees hold the blocks that they are made from.

In rows, a grid step has one block of U chunks of each operand; of packed sequences it has one block a chunk, since each
lies where the table of chunks says. Lists below have one entry, or U.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ..common.gradients import Kept
from .slots import ChannelSlot, Slot

__all__ = ["Inputs", "Outputs", "Scratch", "TokenInputs", "UnitScratch", "Windows"]

Ref = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenInputs:
    """q, k or v.

    Attributes:
        now: blocks [1, tokens, channels] that ``scores`` reads, or None where it needs none.
        late: blocks that ``advance`` reads, which is a grid step behind, or None.
        taps: [rows of taps, channels] float32 of the convolution, or None without one.
        past: the 8 inputs before a sequence [1, 8, channels] float32, or None.
    """

    now: list[Ref] | None = None
    late: list[Ref] | None = None
    taps: Ref | None = None
    past: list[Ref] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What the kernel reads.

    Attributes:
        q, k, v: the operands by token.
        g, b, w: gates, [1, 1, decays or heads, tokens], or by channel [1, tokens, channels]; b and w may be None.
        gate: parameters of the gate, [1, decays, 2] or by channel [2, channels], where it is computed inside.
        S_first: states that sequences start from [1, heads, K, V], or None for zeros.
        z: the output's gate [1, tokens, channels], as ``advance`` reads it, or None without one.
        norm_weight: of the output's norm [1, V] float32, or None without one.
    """

    q: TokenInputs
    k: TokenInputs
    v: TokenInputs
    g: list[Ref]
    b: list[Ref] | None
    w: list[Ref] | None
    gate: Ref | None
    S_first: list[Ref] | None
    z: list[Ref] | None = None
    norm_weight: Ref | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What the kernel writes: o [1, tokens, channels] and the final states [1, heads, K, V], or of packed sequences the
    whole arrays in HBM; what is kept of chunks; and what o was before its norm, like o, or None."""

    o: Ref
    S_last: Ref
    kept: Kept
    o_kept: Ref | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """Tokens in float32 behind those before them, [tiles of channels, HISTORY + tokens, 128]."""

    q: Ref
    k: Ref
    v: Ref


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnitScratch:
    """Scratch of a grid step, or of packed sequences of each of its chunks.

    Attributes:
        S: the state that the chunk starts from [heads, key lanes, value lanes] float32, a head's in whole tiles.
        windows: what the convolution reads, or None.
        o_stage: the output on its way to HBM [C, channels], of packed sequences.
        kept_stage: what it was before its norm, likewise, where that is kept.
        S_stage: a final state on its way to HBM [heads, K, V], of packed sequences with heads that are no whole tiles.
    """

    S: Ref
    windows: Windows | None
    o_stage: Ref | None
    S_stage: Ref | None
    kept_stage: Ref | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scratch:
    """All scratch: by grid step or chunk; semaphores of what is sent, a chunk each; a slot a chunk."""

    units: list[UnitScratch]
    o_sent: Ref | None
    S_sent: Ref | None
    slots: list[Slot] | list[ChannelSlot]
    kept_sent: Ref | None = None
