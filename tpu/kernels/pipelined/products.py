"""Products of the pipelined kernels, whose operands are sums of summands as the plan's precision says."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..common.products import dot
from ..common.registers import BF16, F32, iota
from ..common.summands import Parts, pieces
from ..common.tiles import CHUNK
from . import vmem
from .geometry import Pipeline

__all__ = ["halves", "operand_dtype", "product", "spread"]

Array = Any


def operand_dtype(p: Pipeline) -> Any:
    """The dtype of operands of products, or of their summands."""
    return jnp.dtype(vmem.operand_dtype(p))


def halves(p: Pipeline, x: Array) -> Parts:
    """x float32 as what enters a product: itself, rounded, or as a sum of two."""
    return (x,) if p.precision == "highest" else pieces(x, p.summands)


def product(p: Pipeline, a: Parts, b: Parts) -> Array:
    """a b, each one array or a sum of two: [M, K] with [K, N], float32.

    Four products of whole tiles fill a matrix unit of 256 x 256 twice as well as four by themselves: summands of a lie
    side by side, those of b in all four quarters. Elsewhere, and where a is narrower, summands of a are stacked, since
    they share what is loaded into the unit, and the two small summands' product is left out.
    """
    if len(a) == 1:
        return dot(a[0], b[0])
    rows, depth = a[0].shape
    if depth == CHUNK and p.wide_mxu:
        wide, width = jnp.concatenate(b, 1), b[0].shape[1]
        both = dot(jnp.concatenate(a, 1), jnp.concatenate([wide, wide], 0))
        return both[:, :width] + both[:, width:]
    stacked = dot(jnp.concatenate(a, 0), b[0])
    return stacked[:rows] + stacked[rows:] + dot(a[0], b[1])


def spread(columns: Array, heads: int, head: int) -> Array:
    """A head's column over the lanes [C, C]: float32 by the XLU, pieces of it by the matrix unit, which adds them up.

    Args:
        columns: [C, heads] float32, or [C, PIECES * heads] bfloat16.
    """
    if columns.dtype == F32:
        return jnp.broadcast_to(columns[:, head : head + 1], (CHUNK, CHUNK))
    row = iota((columns.shape[1], CHUNK), 0)
    return dot(columns, (lax.rem(row, jnp.int32(heads)) == head).astype(BF16))
