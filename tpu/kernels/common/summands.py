"""float32 values as sums of bfloat16 ones, which is what enters products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .registers import BF16, F32
from .tiles import PIECES

__all__ = ["PIECES", "Parts", "each", "exact_pieces", "pieces"]

Array = Any
#: Arrays of one shape that add up to an operand.
Parts = tuple[Array, ...]


def pieces(x: Array, count: int) -> Parts:
    """x float32 as ``count`` bfloat16 summands, the larger first."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(BF16))
        x = x - parts[-1].astype(F32)
    return tuple(parts)


def exact_pieces(x: Array) -> Parts:
    """``PIECES`` bfloat16 summands of x float32.

    They are cut off by their bits: XLA, which compiles interpreted kernels, may leave out a rounding to bfloat16 that
    it sees, and then they would not add up.
    """
    parts = []
    for _ in range(PIECES):
        upper = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        piece = lax.bitcast_convert_type(upper, F32)
        parts.append(piece.astype(BF16))
        x = x - piece
    return tuple(parts)


def each(function: Any, *parts: Parts) -> Parts:
    """A rearrangement of each summand."""
    return tuple(function(*p) for p in zip(*parts, strict=True))
