"""One chunk of one value head backwards, decays by channel: ``spec.chunkwise.backward_chunk`` on values in VMEM.

Decays are factors (``decays``), so no exponent is positive and a reset is a factor 0. With P_i the decay from a block's
start into row i and Q_j that from row j to its block's end, a level of s rows gives to rows i of right blocks and keys
j of the left blocks beside them

    into rows  P_i sum_j dA_ij (k_j Q_j)          into keys  Q_j sum_i dA_ij (x_i P_i)

The gates' cotangents are those of the factors' logarithms. Doubling blocks multiplies P of a right block's rows by the
last P of the left block, and Q of a left block's rows by the last P of the right one; so what reaches the factors of
blocks of 2 s rows reaches, summed over half a block, one row of the other half, level by level down to single tokens,
whose P is exp(g). Every sum is of terms that decay across the token, and nothing cancels.

Heads are separate arrays, and functions generators that stop where products are awaited: ``by_head`` runs many side by
side, since the matrix unit takes products in program order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....spec.chunkwise import ChunkGradients
from ....spec.stages import RESET
from ..common.decay_factors import doubled, exchanged, joined, rows_of_tiles, split, tiles
from ..common.interleaving import interleave
from ..common.products import KernelProduct
from ..common.registers import iota, square_indices
from ..common.summands import Parts, each
from ..common.tiles import SUBLANES
from .plan import Plan
from .stages import across_lanes, down_rows

__all__ = ["ChannelOperands", "Solved", "by_head", "decay_factors", "gradients", "scores"]

Array = Any
Factors = list[tuple[Array, Array]]


class ChannelOperands(NamedTuple):
    """Operands of a chunk and value head, float32: q, k, g [C, K]; v, dO [C, V]; b [C, 1 or K] and w [C, 1 or V], None
    where there is none, w too where b is one gate for both; S, at the chunk's start, and dS, the cotangent of the state
    after it, [K, V]."""

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array | None
    w: Array | None
    S: Array
    dO: Array
    dS: Array

    def parts(self, shared: bool) -> tuple[Array | None, Array, Array]:
        """What erases, what is written as key, and as value, [C, K] twice and [C, V].

        One gate for both scales keys alone: Vn = b u, and u = (I + L diag(b))^-1 (v - (k exp G) S) with L of keys.
        """
        if shared:
            return self.k, self.b * self.k, self.v
        return None if self.b is None else self.b * self.k, self.k, self.v if self.w is None else self.w * self.v


class Solved(NamedTuple):
    """What is solved of a chunk and value head, float32 or what enters products of it: M = (I + A)^-1 [C, C], None
    where nothing erases; u [C, V], None where it is still to be computed; Aqk [C, C], keys as written, without
    scale."""

    M: Any
    u: Any
    Aqk: Any


def by_head(run: Callable[..., Iterator[Any]], heads: Sequence[tuple[Any, ...]], batched: bool) -> list[Any]:
    """What a generator function returns for the arguments of each head.

    The generators take turns. ``batched``, for interpreters: heads are one batch of the same program, so that XLA does
    not compile it once per head.
    """
    if batched:
        found = jax.vmap(lambda args: interleave([run(*args)])[0])(jax.tree.map(lambda *a: jnp.stack(a), *heads))
        return [jax.tree.map(lambda a, i=i: a[i], found) for i in range(len(heads))]
    return interleave(run(*args) for args in heads)


def _half(x: Array, size: int, right: bool) -> Array:
    """The right or the left blocks' rows [C / 2, D]."""
    return jnp.reshape(split(x, size)[right], (x.shape[0] // 2, x.shape[1]))


def _blocks(x: Array, size: int) -> Array:
    """The inverse of ``split``'s half: [C / 2 size, size, D]."""
    return jnp.reshape(x, (-1, size, x.shape[1]))


def _beside_zeros(x: Array, size: int, right: bool) -> Array:
    """Rows of the right or left blocks [C / 2, D] in their places, zeros in the others."""
    x = _blocks(x, size)
    zeros = jnp.zeros_like(x)
    return joined(zeros, x) if right else joined(x, zeros)


def _masked(mask: Array, x: Array) -> Array:
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def _masked_half(apart: Array, size: int, right: bool, x: Array) -> Array:
    """Rows of the right or left blocks of x [C, C], in the lanes of their pair; apart: row ^ column."""
    return _masked(_half(apart, size, right) < 2 * size, _half(x, size, right))


def _added(x: Array, half: Array, right: bool, size: int) -> Array:
    """x with rows of the right or left blocks added."""
    parts = list(split(x, size))
    parts[right] = parts[right] + _blocks(half, size)
    return joined(*parts)


def decay_factors(p: Plan, g: Array) -> Factors:
    """P and Q of blocks of 1, 2, 4, ... C rows, [C, K] each."""
    found, size = [(jnp.exp(g), jnp.ones_like(g))], 1
    while size < g.shape[0]:
        found.append(doubled(*found[-1], size, p.gathers))
        size *= 2
    return found


def scores(p: Plan, mm: KernelProduct, x: ChannelOperands, factors: Factors) -> Iterator[Any]:
    """A (None where nothing erases) and Aqk of a head [C, C], keys as written, without scale."""
    C = x.k.shape[0]
    row, column = square_indices(C)
    erased, key, _ = x.parts(p.widths.shared)
    rows = [x.q] if erased is None else [x.q, erased]
    out = [jnp.where(row == column, jnp.sum(x.q * key, -1, keepdims=True), 0.0), jnp.zeros((C, C), jnp.float32)]
    out = out[: len(rows)]
    size = 1
    while size < C:
        P, Q = factors[size.bit_length() - 1]
        if size < SUBLANES:
            decayed, keys = [a * P for a in rows], key * Q
        else:
            decay = _half(P, size, True)
            decayed = [_half(a, size, True) * decay for a in rows]
            keys = _beside_zeros(_half(key, size, False) * _half(Q, size, False), size, False)
        found = mm.right_transposed(jnp.concatenate(decayed, 0), keys, "k", "k")
        yield
        for i, corners in enumerate(_rows(found, len(rows))):
            if size < SUBLANES:
                apart = row ^ column
                here = (apart >= size) & (apart < 2 * size) & (row > column)
                out[i] = jnp.where(here, corners, out[i])
            else:
                left, right = split(out[i], size)
                own = split(row ^ column, size)[1] < size
                out[i] = joined(left, jnp.where(own, right, _blocks(corners, size)))
        size *= 2
    return None if erased is None else jnp.where(row > column, out[1], 0.0), jnp.where(row >= column, out[0], 0.0)


def _beside(parts: list[Parts], axis: int) -> Parts:
    """Operands side by side as one."""
    return each(lambda *a: jnp.concatenate(a, axis), *parts)


def _rows(x: Array, count: int) -> list[Array]:
    """Arrays that are stacked in x."""
    height = x.shape[0] // count
    return [x[n * height : (n + 1) * height] for n in range(count)]


def gradients(p: Plan, mm: KernelProduct, x: ChannelOperands, factors: Factors, solved: Solved) -> Iterator[Any]:
    """``ChunkGradients`` of a head, b and w as they are given."""
    S, dS, shared, scale = x.S, x.dS, p.widths.shared, p.scale
    erased, key, written = x.parts(shared)
    C = key.shape[0]
    row, column = square_indices(C)
    begin, end = factors[-1]
    kept = jnp.exp(jnp.sum(x.g, 0, keepdims=True))

    M, u, Aqk = solved
    if erased is None:
        u = written
    elif u is None:
        u = written - mm(erased * begin, S, "k", "S")
        yield
        u = mm(M, u, "T", "R")
    # What enters several products is rounded once.
    u, dO = mm.parts(u, "Vn"), mm.parts(x.dO, "dO")
    before, after = mm.parts(S, "S"), mm.parts(dS, "dS")
    du = scale * mm.left_transposed(Aqk, dO, "Aqk", "dO") + mm(key * end, after, "k", "dS")
    yield
    Y = du if erased is None else mm.left_transposed(M, du, "T", "dVn")
    dkey_state = end * mm.right_transposed(u, after, "Vn", "dS")
    dq_state = (scale * begin) * mm.right_transposed(dO, before, "dO", "S")
    dA = [mm.right_transposed(dO, u, "dO", "Vn") * scale]
    yield
    rows, drows = [x.q], [dq_state]
    into = mm.left_transposed(x.q * begin * scale, dO, "q", "dO")
    reads = x.q * dq_state
    if erased is not None:
        X = mm.parts(Y, "X")
        derased_state = -begin * mm.right_transposed(X, before, "X", "S")
        dA.append(-mm.right_transposed(X, u, "X", "Vn"))
        into = into - mm.left_transposed(erased * begin, X, "k", "X")
        rows.append(erased)
        drows.append(derased_state)
        reads = reads + erased * derased_state
        yield
    dS0 = down_rows(kept) * dS + into
    through = kept * across_lanes(jnp.sum(S * dS, -1, keepdims=True))
    same = jnp.sum(jnp.where(row == column, dA[0], 0.0), -1, keepdims=True)
    dA = [mm.parts(a, "dA") for a in dA]
    dAT = [each(jnp.transpose, a) for a in dA]
    drows[0] = drows[0] + same * key
    dkey = dkey_state + same * x.q
    line = iota(key.shape, 0)
    dP = reads + jnp.where(line == C - 1, through, 0.0)
    begun = _Cotangents(drows, dkey, dP, key * dkey_state)
    scored = _Scored(rows, key, dA, dAT, (row, column))
    drows, dkey, dP, _ = yield from _through_levels(p, mm, factors, scored, begun)
    dg = jnp.where(x.g < RESET, 0.0, dP)
    return _as_given(x, shared, (drows, dkey, Y), dg, dS0)


def _as_given(
    x: ChannelOperands, shared: bool, d: tuple[list[Array], Array, Array], dg: Array, dS0: Array
) -> ChunkGradients:
    """The gradients of a head's operands from those of its rows, of keys as written, and of what is written."""
    drows, dkey, Y = d
    if shared:
        db = jnp.sum(dkey * x.k, -1, keepdims=True)
        return ChunkGradients(drows[0], drows[1] + x.b * dkey, Y, dg, db, None, dS0)
    db = dw = None
    if x.b is not None:
        db, dkey = drows[1] * x.k, dkey + x.b * drows[1]
        db = jnp.sum(db, -1, keepdims=True) if x.b.shape[-1] == 1 else db
    dv = Y
    if x.w is not None:
        dv, dw = x.w * Y, Y * x.v
        dw = jnp.sum(dw, -1, keepdims=True) if x.w.shape[-1] == 1 else dw
    return ChunkGradients(drows[0], dkey, dv, dg, db, dw, dS0)


class _Scored(NamedTuple):
    """What meets in a head's scores: rows and key [C, K]; dA, the cotangents of the scores of each of ``rows``, and
    dAT, their transposes, as they enter products [C, C]; square: row and column numbers."""

    rows: list[Array]
    key: Array
    dA: list[Parts]
    dAT: list[Parts]
    square: tuple[Array, Array]


class _Cotangents(NamedTuple):
    """Cotangents of ``_Scored``'s rows and key, to which each level adds; and of log P and log Q of a level's blocks,
    first of the whole chunk. [C, K] each."""

    rows: list[Array]
    key: Array
    P: Array
    Q: Array


def _through_levels(
    p: Plan, mm: KernelProduct, factors: Factors, x: _Scored, d: _Cotangents
) -> Generator[None, None, _Cotangents]:
    """Add what the scores of every level give, from the whole chunk's halves down to single tokens."""
    drows, dkey, dP, dQ = d
    pending = None
    size = x.key.shape[0] // 2
    while size:
        dP, pending = _halved(dP, dQ, pending, size, p.gathers)
        level = _level(x, factors[size.bit_length() - 1], size)
        lows, ups = [each(level.lower, a) for a in x.dA], [each(level.upper, a) for a in x.dAT]
        to_rows = mm(_beside(lows, 0), level.placed, "dA", "k")
        to_keys = mm(_beside(ups, 1), jnp.concatenate(level.stacked, 0), "dA", "k")
        yield
        added = (lambda x, a, right: x + a) if size < SUBLANES else partial(_added, size=size)
        for i, a in enumerate(_rows(to_rows, len(x.rows))):
            drows[i] = added(drows[i], level.P * a, right=True)
            dP = added(dP, level.decayed[i] * a, right=True)
        dkey = added(dkey, level.Q * to_keys, right=False)
        dQ = added(dQ, level.keys * to_keys, right=False)
        size //= 2
    return _Cotangents(drows, dkey, dP, dQ)


class _Level(NamedTuple):
    """One level of the hierarchy, of whole arrays [C, ..] below eight rows, else of the half that takes part.

    P, Q: factors of rows and keys; keys, decayed: keys and rows times them; lower, upper: masks of cotangents and their
    transposes; placed, stacked: keys and rows in their places among zeros [C, K], for products.
    """

    P: Array
    Q: Array
    keys: Array
    decayed: list[Array]
    lower: Callable[[Array], Array]
    upper: Callable[[Array], Array]
    placed: Array
    stacked: list[Array]


def _level(x: _Scored, factors: tuple[Array, Array], size: int) -> _Level:
    (P, Q), (row, column) = factors, x.square
    apart = row ^ column
    if size < SUBLANES:
        keys, decayed = x.key * Q, [a * P for a in x.rows]
        corner = (apart >= size) & (apart < 2 * size)
        lower, upper = partial(_masked, corner & (row > column)), partial(_masked, corner & (row < column))
        return _Level(P, Q, keys, decayed, lower, upper, keys, decayed)
    P, Q = _half(P, size, True), _half(Q, size, False)
    keys, decayed = _half(x.key, size, False) * Q, [_half(a, size, True) * P for a in x.rows]
    lower, upper = (partial(_masked_half, apart, size, right) for right in (True, False))
    placed, stacked = _beside_zeros(keys, size, False), [_beside_zeros(a, size, True) for a in decayed]
    return _Level(P, Q, keys, decayed, lower, upper, placed, stacked)


def _halved(dP: Array, dQ: Array, pending: Array | None, size: int, gathers: bool) -> tuple[Array, Array | None]:
    """Cotangents of log P of blocks of ``size`` rows from those of blocks of 2 size, log Q's beside them.

    pending: what has reached the last row of each block of 2 size rows and is not in dP yet, as eight summands in
    sublanes [C / 2 size, 8, K], so that sublanes are summed only once, where blocks of eight rows are cut.
    """
    C, K = dP.shape
    if size >= SUBLANES:
        by_block = lambda x: jnp.reshape(x, (C // (2 * size), 2, size // SUBLANES, SUBLANES, K))  # noqa: E731
        right, left = jnp.sum(by_block(dP)[:, 1], 1), jnp.sum(by_block(dQ)[:, 0], 1)
        if pending is not None:
            right, left = right + pending, left + pending
        return dP, jnp.reshape(jnp.stack([right, left], 1), (C // size, SUBLANES, K))

    def over_blocks(x: Array, size: int) -> Array:
        """Sums over ``size`` rows, at each of them."""
        step = 1
        while step < size:
            x = x + exchanged(x, step, gathers)
            step *= 2
        return x

    P, Q, row = tiles(dP), tiles(dQ), rows_of_tiles(dP)
    if pending is not None:
        P = P + jnp.where(row == SUBLANES - 1, over_blocks(pending, SUBLANES), 0.0)
    total = over_blocks(jnp.where(row & size != 0, P, Q), size)
    P = P + jnp.where(row & (size - 1) == size - 1, exchanged(total, size, gathers), 0.0)
    return jnp.reshape(P, (C, K)), None
