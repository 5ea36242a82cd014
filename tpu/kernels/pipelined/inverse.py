"""The inverse of I + A of a chunk, A strictly lower triangular [C, C], level by level: three phases of the pipeline.

Diagonal blocks of 16 are inverted by substitution; with X and Y the inverses of two neighbouring blocks and L the block
of A that joins them, the inverse of both is [[X, 0], [-Y L X, Y]]. Blocks of one level lie side by side in the lanes.
A phase is a generator that stops after each head, or each column of the substitution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..common.registers import F32, block_of, iota, within
from ..common.summands import each
from ..common.tiles import CHUNK
from .geometry import Pipeline
from .products import halves, operand_dtype, product
from .slots import Blocks, read, write

__all__ = ["solve_16", "solve_64", "solve_128", "write_blocks"]

Array = Any
C = CHUNK


def write_blocks(p: Pipeline, blocks: Blocks, i: int, A: Array) -> None:
    """The blocks of a head's A [C, C] that the inverse is built from, each level's side by side."""
    lane16, lane32 = iota((16, C), 1), iota((32, C), 1)
    packed, low16 = A[:16], A[16:32]
    for j in range(1, 8):
        packed = jnp.where(block_of(lane16, 16) == j, A[16 * j : 16 * j + 16], packed)
    for j in range(1, 4):
        low16 = jnp.where(block_of(lane16, 32) == j, A[32 * j + 16 : 32 * j + 32], low16)
    blocks.packed[i] = jnp.where(iota((16, C), 0) > within(lane16, 16), packed, 0.0)
    write(blocks.low16, i, halves(p, jnp.where(within(lane16, 32) < 16, low16, 0.0)))
    write(blocks.low32, i, halves(p, jnp.where(lane32 < 32, A[32:64], pltpu.roll(A[96:], C - 32, 1))))
    write(blocks.low64, i, halves(p, A[64:]))


def _in_place(square: tuple[Array, Array], size: int, zero: Array) -> Callable[[Array], Array]:
    """A function that puts products [size, C], side by side for the lower left corners of blocks of 2 size, into their
    places in [C, C], zeros elsewhere."""
    row, column = square
    corner = block_of(row, 2 * size) == block_of(column, 2 * size)
    corner &= (within(row, 2 * size) >= size) & (within(column, 2 * size) < size)
    return lambda a: jnp.where(corner, jnp.concatenate([a] * (C // size), 0), zero)


def _joined(lane: Array, zero: Array) -> Callable[[Array, Array], Array]:
    """A function that makes inverses of blocks of 2 size [2 size, C] from those of blocks of ``size`` and the products
    for the corners between them [size, C]; lane: lane numbers [size, C]."""
    size = lane.shape[0]
    odd = within(lane, 2 * size) >= size
    return lambda a, b: jnp.concatenate([jnp.where(odd, zero, a), jnp.where(odd, a, -b)], 0)


def _on_diagonal(square: tuple[Array, Array], size: int) -> Callable[[Array], Array]:
    """A function that puts blocks [size, C] side by side on the diagonal of [C, C], zeros elsewhere."""
    row, column = square
    return lambda x: jnp.where(
        block_of(row, size) == block_of(column, size),
        jnp.concatenate([x] * (C // size), 0),
        jnp.zeros((), x.dtype),
    )


def solve_16(p: Pipeline, blocks: Blocks) -> Iterator[None]:
    """Blocks of 16 by forward substitution: column j of every block is final after j steps."""
    row, lane = iota((16, C), 0), iota((16, C), 1)
    A = [blocks.packed[i] for i in range(p.heads)]
    X = [(row == within(lane, 16)).astype(F32)] * p.heads
    for j in range(15):
        columns = [jnp.take_along_axis(a, block_of(lane, 16) * 16 + j, axis=1) for a in A]
        X = [a - c * jnp.broadcast_to(a[j : j + 1], a.shape) for a, c in zip(X, columns, strict=True)]
        yield
    for i in range(p.heads):
        blocks.packed[i] = X[i]
    yield


def solve_64(p: Pipeline, blocks: Blocks, square: tuple[Array, Array]) -> Iterator[None]:
    """Join blocks of 16 to 32, and begin to join those to 64; square: row and column numbers [C, C]."""
    heads, low, X = range(p.heads), [], []
    zero = jnp.zeros((), operand_dtype(p))
    lane16, lane32 = iota((16, C), 1), iota((32, C), 1)
    diagonal = _on_diagonal(square, 16)
    for i in heads:
        X.append(halves(p, blocks.packed[i]))
        low.append(product(p, read(blocks.low16, i), each(diagonal, X[i])))
        yield
    place = _in_place(square, 16, zero)
    for i in heads:
        low[i] = product(p, X[i], each(place, halves(p, low[i])))
        yield
    join = _joined(lane16, zero)
    firsts = lambda a: jnp.concatenate(  # noqa: E731
        [jnp.where(lane32 < 32, a, zero), jnp.where((lane32 >= 64) & (lane32 < 96), a, zero)], 0
    )
    for i in heads:
        X[i] = each(join, X[i], halves(p, low[i]))
        low[i] = product(p, each(lambda a: a[:, :64], read(blocks.low32, i)), each(firsts, X[i]))
        yield
    for i in heads:
        write(blocks.M, i, X[i], slice(0, 32))
        write(blocks.M, i, halves(p, low[i]), slice(32, 64))
        yield


def solve_128(p: Pipeline, blocks: Blocks, square: tuple[Array, Array]) -> Iterator[None]:
    """Join blocks of 32 to 64, and those to the whole inverse; square: row and column numbers [C, C]."""
    heads, X, low = range(p.heads), [], []
    zero = jnp.zeros((), operand_dtype(p))
    lane32, lane64 = iota((32, C), 1), iota((64, C), 1)
    place = _in_place(square, 32, zero)
    for i in heads:
        X.append(read(blocks.M, i, slice(0, 32)))
        low.append(product(p, X[i], each(place, read(blocks.M, i, slice(32, 64)))))
        yield
    join = _joined(lane32, zero)
    for i in heads:
        X[i] = each(join, X[i], halves(p, low[i]))
        low[i] = product(p, each(lambda a: a[:, :64], read(blocks.low64, i)), X[i])
        yield
    left = lane64 < 64
    below = lambda a: jnp.concatenate([jnp.zeros((64, C), operand_dtype(p)), jnp.where(left, a, zero)], 0)  # noqa: E731
    for i in heads:
        low[i] = product(p, X[i], each(below, halves(p, low[i])))
        yield
    for i in heads:
        write(blocks.M, i, each(lambda a: jnp.where(left, a, zero), X[i]), slice(0, 64))
        whole = each(lambda a, b: jnp.where(left, -b, a), X[i], halves(p, low[i]))
        write(blocks.M, i, whole, slice(64, C))
        yield
