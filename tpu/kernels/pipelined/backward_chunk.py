"""One chunk of all heads of a grid step backwards, stage by stage; ``backward`` says what each stage does.

A stage is a generator that stops after each head, and what it leaves to later ones are lists by head. Names with a t
are transposed: channels in sublanes and tokens in lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..common.decay_trees import by_masks, decay_sums, to_chunk_end
from ..common.products import dot
from ..common.registers import BF16, F32, iota, square_indices
from ..common.summands import PIECES, Parts, exact_pieces, pieces
from ..common.tiles import CHUNK
from .backward_memory import BackwardMemory
from .backward_plan import Reverse
from .backward_refs import Refs

__all__ = ["BackwardChunk"]

Array = Any
C = CHUNK
#: Pairs of arrays whose products add up to a product.
Terms = list[tuple[Array, Array]]


class _Gates(NamedTuple):
    """The gates of a chunk, heads in sublanes and tokens in lanes [heads, C].

    G: base-2 sum of log decays since the last reset; begin: 2^G, or 0 behind a reset; b: gate; run: tokens since the
    last reset; ahead: tokens to the next one; end: 2^(G_C - G), or 0 before a reset; reset: whether the gate is one.
    columns: pieces of G, end and b [C, 3 PIECES heads] bfloat16, to be spread over the lanes.
    """

    G: Array
    begin: Array
    b: Array
    run: Array
    ahead: Array
    end: Array
    reset: Array
    columns: Array


#: Places of a kind in ``_Gates.columns``.
_G, _END, _B = range(3)


def _gates(g: Array, b: Array) -> _Gates:
    decays = decay_sums(g, by_masks, look_ahead=True)
    begin = decays.from_start
    seen, to_end = to_chunk_end(decays)
    end = jnp.where(seen, jnp.exp2(to_end), 0.0)
    rows = [piece.astype(F32) for a in (decays.sum, end, b) for piece in exact_pieces(a)]
    columns = jnp.concatenate(rows, 0).T.astype(BF16)
    run = (decays.lane - decays.last_reset).astype(F32)
    ahead = (decays.next_reset - decays.lane).astype(F32)
    return _Gates(decays.sum, begin, b, run, ahead, end, decays.reset, columns)


def _from_here_on(x: Array) -> Array:
    """At each lane the sum of a row over that and later lanes, [heads, C]."""
    lane, size = iota(x.shape, 1), 1
    while size < C:
        x = x + jnp.where(lane < C - size, pltpu.roll(x, C - size, 1), 0.0)
        size *= 2
    return x


def _total(x: Array) -> Array:
    """The sum of all of x, [1, 1]."""
    return jnp.sum(jnp.sum(x, 0, keepdims=True), 1, keepdims=True)


def _sum_of(terms: Sequence[Array]) -> Array:
    return sum(terms[1:], terms[0])


def _terms(a: Parts, b: Parts) -> Terms:
    """Pairs of arrays whose products add up to a b, without that of the small halves."""
    return [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < 2]


def _product(*terms: Terms) -> Array:
    """The sum of products, as one with joined contractions."""
    pairs = [pair for some in terms for pair in some]
    return dot(jnp.concatenate([a for a, _ in pairs], 1), jnp.concatenate([b for _, b in pairs], 0))


def _row(a: Array, i: int) -> Array:
    """A head's row [1, C]."""
    return a[i : i + 1]


class _KeyHead(NamedTuple):
    """What value heads share: q, k [C, 128] and their transposes, bfloat16; scores [C, C] float32, q k^T and k q^T with
    scale, and k k^T above the diagonal, [j, i] for i > j."""

    q: Array
    k: Array
    qt: Array
    kt: Array
    qk: Array
    kq: Array
    kk: Array


class BackwardChunk:
    """Chunk ``n`` of a grid step, whose first token is the row's token ``first``."""

    gates: _Gates

    def __init__(self, p: Reverse, refs: Refs, n: int, first: Array) -> None:
        self.p, self.x, self.out, self.dSt_ref = p, refs.x, refs.out, refs.dSt
        self.row, self.col = square_indices(C)
        self.memory = BackwardMemory(p, refs, n, first, self.row)
        # From ``read``: by key head; dO^T, G over the lanes, and u, by value head.
        self.keys_of: list[_KeyHead] = []
        self.dOt: list[Array] = []
        self.G: list[Array] = []
        self.u: list[Parts] = []
        # From ``solve`` and ``erase``: dS^T behind the chunk; cotangents of b u, and Y^T, of v.
        self.dSt: list[Array] = []
        self.du: list[Parts] = []
        self.Y: list[Array] = []
        # From ``before``: u dO^T, u dS^T; what the state gives to q; the cotangent of what passes through, [1, 1].
        self.udO: list[Array] = []
        self.udS: list[Array] = []
        self.dqs: list[Array] = []
        self.through: list[Array] = []
        # From ``pairs``: u Y^T and its diagonal; what the state gives to k.
        self.uY: list[Array] = []
        self.uX: list[Array] = []
        self.dks: list[Array] = []
        # From ``keys``: cotangents of scores; sums of pairs over later rows; b over the lanes; what keys write.
        self.dA: list[tuple[Array, Array]] = []
        self.later: list[Array] = []
        self.b: list[Array] = []
        self.written: list[Array] = []

    def _halves(self, x: Array) -> Parts:
        return pieces(x, self.p.summands)

    def _key_head(self, i: int) -> _KeyHead:
        return self.keys_of[i // self.p.R]

    def _spread(self, kind: int, i: int) -> Array:
        """A head's column of a kind over the lanes [C, C]."""
        row, heads = iota((self.gates.columns.shape[1], C), 0), self.p.heads
        of = lambda n: row == (PIECES * kind + n) * heads + i  # noqa: E731
        return dot(self.gates.columns, (of(0) | of(1) | of(2)).astype(BF16))

    def read(self) -> Iterator[None]:
        """The operands, and scores of key heads."""
        p, x = self.p, self.x
        self.gates = _gates(*self.memory.gates())
        for i in range(p.heads):
            if i % p.R == 0:
                q, k = (self.memory.tokens(ref, i // p.R) for ref in (x.q, x.k))
                qt, kt = q.T, k.T
                both = dot(jnp.concatenate([q, k], 0), kt)
                qk, kq = both[:C] * p.scale, dot(k, qt) * p.scale
                self.keys_of.append(_KeyHead(q, k, qt, kt, qk, kq, jnp.where(self.col > self.row, both[C:], 0.0)))
            self.dOt.append(self.memory.output_cotangent(i).T)
            self.G.append(self._spread(_G, i))
            self.u.append(self.memory.solved(x.u, i))
            yield

    def solve(self) -> Iterator[None]:
        """du^T = b (dO^T Aqk + dS^T (k end)^T)."""
        gates = self.gates
        distance = jnp.where(self.row >= self.col, self.row - self.col, 4 * C).astype(F32)
        for i in range(self.p.heads):
            head = self._key_head(i)
            D = jnp.exp2(jnp.where(distance < _row(gates.ahead, i), self.G[i] - _row(gates.G, i), -jnp.inf))
            self.dSt.append(self.dSt_ref[i].astype(BF16))
            kend = (head.kt.astype(F32) * _row(gates.end, i)).astype(BF16)
            dVn = _product(_terms((self.dOt[i],), self._halves(head.qk * D)), _terms((self.dSt[i],), (kend,)))
            self.du.append(self._halves(dVn * _row(gates.b, i)))
            yield

    def erase(self) -> Iterator[None]:
        """Y^T = du^T M."""
        for i in range(self.p.heads):
            self.Y.append(_product(_terms(self.du[i], self.memory.solved(self.x.M, i))))
            yield

    def before(self) -> Iterator[None]:
        """What needs no cotangent of this chunk's own."""
        for i in range(self.p.heads):
            S = self.memory.state(i)
            self.udO.append(_product(_terms(self.u[i], (self.dOt[i],))))
            self.udS.append(_product(_terms(self.u[i], (self.dSt[i],))))
            self.dqs.append(dot(S.astype(BF16), self.dOt[i]) * (_row(self.gates.begin, i) * self.p.scale))
            kept = _row(self.gates.begin, i)[:, C - 1 :]
            self.through.append(kept * _total(S.T * self.dSt_ref[i]))
            yield

    def pairs(self) -> Iterator[None]:
        """u Y^T, S Y^T, and the state's cotangent for the chunk before."""
        for i in range(self.p.heads):
            head, begin = self._key_head(i), _row(self.gates.begin, i)
            Y = self._halves(self.Y[i])
            self.uY.append(_product(_terms(self.u[i], Y)))
            self.uX.append(jnp.sum(jnp.where(self.row == self.col, self.uY[i], 0.0), 0, keepdims=True))
            self.dks.append(_product(_terms((self.memory.state(i).astype(BF16),), Y)) * -begin)
            dOb = (self.dOt[i].astype(F32) * (begin * self.p.scale)).astype(BF16)
            Yb = self._halves(self.Y[i] * -begin)
            new = _product(_terms((dOb,), (head.q,)), _terms(Yb, (head.k,)))
            self.dSt_ref[i] = self.dSt_ref[i] * begin[:, C - 1 :] + new
            yield

    def keys(self) -> Iterator[None]:
        """The cotangents of scores, and sums of pairs for those of the decays."""
        p, gates = self.p, self.gates
        distance = jnp.where(self.col >= self.row, self.col - self.row, 4 * C).astype(F32)
        for i in range(p.heads):
            head = self._key_head(i)
            D = jnp.exp2(jnp.where(distance <= _row(gates.run, i), _row(gates.G, i) - self.G[i], -jnp.inf))
            # Lanes are rotated by the head's number, so that token 0 of each head lies in a lane of its own.
            rows = ((self.col - i) & (C - 1)) <= self.row
            W = self.udO[i] * D, jnp.where(self.col > self.row, self.uY[i] * -D, 0.0)
            pair = W[0] * head.kq + W[1] * head.kk
            ones = rows.astype(BF16)
            self.later.append(_product([(half, ones) for half in pieces(pair, 2)]))
            b = self._spread(_B, i)
            self.b.append(b)
            self.dA.append((W[0] * (b * p.scale), W[1] * b))
            self.written.append(self._spread(_END, i) * self.udS[i])
            yield

    def results(self) -> Iterator[None]:
        """The cotangents of v and the gates, and of q and k as sums over value heads."""
        dg, read, db = [], [], jnp.zeros((C, C), F32)
        for i in range(self.p.heads):
            head = self._key_head(i)
            k = head.k.astype(F32)
            yield
            own = self.later[i] + jnp.sum(k * self.written[i], 1, keepdims=True)
            db = jnp.where(self.col == i, own, db)
            earlier = jnp.where(self.row < ((self.col - i) & (C - 1)), own * self.b[i], 0.0)
            dg.append(pltpu.roll(jnp.sum(earlier, 0, keepdims=True), (C - i) % C, 1))
            qt, kt = head.qt.astype(F32), head.kt.astype(F32)
            read.append(jnp.sum(qt * self.dqs[i] + kt * self.dks[i], 0, keepdims=True))
            self.memory.put(self.out.dv, i, self.Y[i].astype(self.out.dv.dtype).T)
        self._put_gates(dg, read, db)
        for h in range(self.p.P):
            self._put_keys(h)

    def _put_gates(self, dg: list[Array], read: list[Array], db: Array) -> None:
        """The gates' cotangents; dg, read: of pairs and of what is read from the state, rows [1, C] by head; db: a
        column a head."""
        gates = self.gates
        total = jnp.concatenate(dg, 0) + _from_here_on(jnp.concatenate(read, 0)) + jnp.concatenate(self.through, 0)
        self.memory.put_gate(self.out.dg, jnp.where(gates.reset, 0.0, total))
        # u_j X_j, with X = Y / b: what the sum gives too, but there it may have cancelled.
        tiny = jnp.abs(gates.b) < 2.0**-60
        divided = jnp.concatenate(self.uX, 0) / jnp.where(tiny, 1.0, gates.b)
        self.memory.put_gate(self.out.db, jnp.where(tiny, db.T[: self.p.heads], divided))

    def _put_keys(self, h: int) -> None:
        """The cotangents of q and k of a key head."""
        mine, head = range(h * self.p.R, (h + 1) * self.p.R), self.keys_of[h]
        dA = [self._halves(_sum_of([self.dA[i][n] for i in mine])) for n in range(2)]
        wide = tuple(jnp.concatenate([a, b], 1) for a, b in zip(*dA, strict=True))
        back = _product(_terms((head.kt,), wide))
        dq, dk = back[:, :C] + _sum_of([self.dqs[i] for i in mine]), back[:, C:] + _sum_of([self.dks[i] for i in mine])
        self.memory.put(self.out.dq, h, dq.astype(self.out.dq.dtype).T)
        natural = _product(_terms(dA[0], (head.q,)), _terms(dA[1], (head.k,)))
        natural = natural + _sum_of([self.b[i] * self.written[i] for i in mine])
        self.memory.put(self.out.dk, h, (natural + dk.T).astype(self.out.dk.dtype))
