"""Products whose operands are sums of bfloat16 halves, and what chunks of 128 tokens need beside them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..pipeline_plan import Pipeline

__all__ = [
    "BF16",
    "F32",
    "LOG2E",
    "PIECES",
    "C",
    "Parts",
    "block_of",
    "dot",
    "each",
    "exact_pieces",
    "halves",
    "iota",
    "product",
    "spread",
    "within",
]

Array = Any
Parts = tuple[Array, ...]

C = 128  # tokens a chunk, and lanes of a register
F32, BF16 = jnp.float32, jnp.bfloat16
LOG2E = 1.4426950408889634
#: bfloat16 pieces of a float32 number that add up to it exactly.
PIECES = 3


def iota(shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def block_of(index: Array, size: int) -> Array:
    """Number of the block of ``size`` (a power of two) that an index lies in. (``//`` asks which TPU it is lowered for,
    which nobody may know.)"""
    return index >> (size.bit_length() - 1)


def within(index: Array, size: int) -> Array:
    """Place of an index in its block."""
    return index & (size - 1)


def dot(a: Array, b: Array) -> Array:
    """The product, in float32: of bfloat16 operands as they are, of float32 ones with nothing rounded away."""
    exact = lax.Precision.HIGHEST if a.dtype == F32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=exact, preferred_element_type=F32)


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


def kept(p: Pipeline) -> Any:
    """The dtype of operands of products, or of their summands."""
    return F32 if p.precision == "highest" else BF16


def halves(p: Pipeline, x: Array) -> Parts:
    """x float32 as what enters a product: itself, rounded, or as a sum of two."""
    return (x,) if p.precision == "highest" else pieces(x, p.summands)


def product(p: Pipeline, a: Parts, b: Parts) -> Array:
    """a b, each one array or a sum of two.

    Four products of whole tiles fill a matrix unit of 256 x 256 twice as well as four by themselves: summands of a lie
    side by side, those of b in all four quarters. Elsewhere, and where a is narrower, summands of a are stacked, since
    they share what is loaded into the unit, and the two small summands' product is left out.
    """
    if len(a) == 1:
        return dot(a[0], b[0])
    rows, depth = a[0].shape
    if depth == C and p.wide_mxu:
        wide, width = jnp.concatenate(b, 1), b[0].shape[1]
        both = dot(jnp.concatenate(a, 1), jnp.concatenate([wide, wide], 0))
        return both[:, :width] + both[:, width:]
    stacked = dot(jnp.concatenate(a, 0), b[0])
    return stacked[:rows] + stacked[rows:] + dot(a[0], b[1])


def each(function: Any, *parts: Parts) -> Parts:
    """A rearrangement of each summand."""
    return tuple(function(*p) for p in zip(*parts, strict=True))


def spread(columns: Array, heads: int, head: int) -> Array:
    """A head's column over the lanes: float32 by the XLU, pieces of it by the matrix unit, which adds them up."""
    if columns.dtype == F32:
        return jnp.broadcast_to(columns[:, head : head + 1], (C, C))
    row = iota((columns.shape[1], C), 0)
    return dot(columns, (lax.rem(row, jnp.int32(heads)) == head).astype(BF16))
