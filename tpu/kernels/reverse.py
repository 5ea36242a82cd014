"""The backward kernel for long sequences of heads that are a tile wide: chunks in reverse, several heads a grid step.

Each stage runs for all heads before the next begins, so that the matrix unit, which takes products in program order,
has the other heads' products while one waits. Cotangents of V-channel tensors are kept transposed, channels in
sublanes and tokens in lanes: what scales tokens is then a row of lanes and costs nothing. With the pipeline's algebra
(M = (I + L diag(b))^-1, u = M r, r = v - (k 2^G) S; it kept M, u and the chunk's first state S), ^T for transposed,
begin = 2^G or 0 behind a reset, end = 2^(G_C - G) or 0 before one, D_ij = 2^(G_i - G_j) or 0:

| stage | what | products |
|---|---|---|
| ``read`` | gates; q^T, k^T, dO^T, S^T; scores q k^T, k q^T, k k^T | 3 a key head |
| ``solve`` | du^T = b (dO^T Aqk + dS^T (k end)^T) | 2 |
| ``erase`` | Y^T = du^T M, the cotangent of r and of v | 1 |
| ``pairs`` | u dO^T, u Y^T; S dO^T, S Y^T, u dS^T; dS <- 2^G_C dS + (q begin)^T dO - (k begin)^T Y | 7 |
| ``keys`` | W = D^T (u dO^T, - u Y^T); dq^T, dk^T from them; dk from both; sums of pairs for dg | 6 |
| ``leave`` | sums over value heads, transposes back, the gates' cotangents | 0 |

The cotangents of a gate gather, on each side of a token, what decays across it (docs/algorithm.md): pairs are summed
over i >= t by a product with ones, in two halves; that and what keys j < t write are then scaled by b_j and summed over
j; column 0 of the same sum, unscaled, is the cotangent of b. Its other form, the product of u with Y / b, does not
cancel, and is taken wherever b is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...spec.stages import RESET
from ..reverse_plan import Reverse
from .backward import RuleGradients
from .halves import BF16, F32, LOG2E, PIECES, C, Parts, dot, exact_pieces, iota, pieces
from .results import result_shapes
from .settings import pallas_call

__all__ = ["reverse"]

Array = Any
#: Stages between the beginnings of two chunks: the next one's ``solve`` needs the state's cotangent from ``pairs``.
OVERLAP = 3


class _Gates(NamedTuple):
    """Of a chunk, heads in sublanes and tokens in lanes [heads, C]; see the file's text. run: tokens since the last
    reset; ahead: tokens to the next one; columns: pieces of G, end and b, to be spread over the lanes."""

    G: Array
    begin: Array
    b: Array
    run: Array
    ahead: Array
    end: Array
    reset: Array
    columns: Array


def _gates(g: Array, b: Array) -> _Gates:
    lane = iota(g.shape, 1)
    reset = g < RESET
    last, G, size = jnp.where(reset, lane, -1), jnp.where(reset, 0.0, g) * LOG2E, 1
    following = jnp.where(lane == C - 1, 2 * C, pltpu.roll(jnp.where(reset, lane, 2 * C), C - 1, 1))
    while size < C:
        end_of_left = (lane & -(2 * size)) + size - 1
        goes_on = ((lane & size) != 0) & (last < 0)
        G = G + jnp.where(goes_on, jnp.take_along_axis(G, end_of_left, axis=1), 0.0)
        last = jnp.where(goes_on, jnp.take_along_axis(last, end_of_left, axis=1), last)
        following = jnp.minimum(following, jnp.where(lane < C - size, pltpu.roll(following, C - size, 1), 2 * C))
        size *= 2
    begin = jnp.where(last < 0, jnp.exp2(G), 0.0)
    seen = lane >= jnp.max(last, 1, keepdims=True)
    total = jnp.sum(jnp.where(lane == C - 1, G, 0.0), 1, keepdims=True)
    end = jnp.where(seen, jnp.exp2(jnp.where(seen, total - G, 0.0)), 0.0)
    rows = [piece.astype(F32) for a in (G, end, b) for piece in exact_pieces(a)]
    columns = jnp.concatenate(rows, 0).T.astype(BF16)
    return _Gates(G, begin, b, (lane - last).astype(F32), (following - lane).astype(F32), end, reset, columns)


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


class _Chunk:
    """One chunk of all heads of a grid step, stage by stage; what a stage leaves to later ones are lists by head."""

    def __init__(self, p: Reverse, x: SimpleNamespace, n: int, first: Array) -> None:
        self.p, self.x, self.n, self.first = p, x, n, first
        self.here = slice(n * C, (n + 1) * C)
        self.row, self.col = iota((C, C), 0), iota((C, C), 1)

    def _terms(self, a: Parts, b: Parts) -> list[tuple[Array, Array]]:
        """Pairs of arrays whose products add up to a b, without that of the small halves."""
        return [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < 2]

    def _mul(self, *terms: list[tuple[Array, Array]]) -> Array:
        """The sum of products, as one with joined contractions."""
        pairs = [pair for some in terms for pair in some]
        return dot(jnp.concatenate([a for a, _ in pairs], 1), jnp.concatenate([b for _, b in pairs], 0))

    def _halves(self, x: Array) -> Parts:
        return pieces(x, self.p.summands)

    def _tokens(self, ref: Any, h: int) -> Array:
        """Rows of a head [C, 128] bfloat16, those beyond T 0."""
        a = ref[0, self.here, h * C : (h + 1) * C]
        if self.p.tail:
            a = jnp.where(self.row + self.first < self.p.T, a.astype(F32), 0.0)
        return a.astype(BF16)

    def _spread(self, kind: int, i: int) -> Array:
        """A head's column of G (0), end (1) or b (2) over the lanes."""
        row, heads = iota((self.gates.columns.shape[1], C), 0), self.p.heads
        of = lambda n: row == (PIECES * kind + n) * heads + i  # noqa: E731
        return dot(self.gates.columns, (of(0) | of(1) | of(2)).astype(BF16))

    def read(self) -> Iterator[None]:
        p, x = self.p, self.x
        g, b = x.g[0, 0, :, self.here], x.b[0, 0, :, self.here]
        if p.tail:
            there = iota(g.shape, 1) + self.first < p.T
            g, b = jnp.where(there, g, 0.0), jnp.where(there, b, 0.0)
        self.gates = _gates(g, b)
        self.q, self.k, self.qt, self.kt, self.qk, self.kq, self.kk = ([] for _ in range(7))
        self.dOt, self.G, self.dSt, self.u = [], [], [], []
        for i in range(p.heads):
            if i % p.R == 0:
                q, k = (self._tokens(ref, i // p.R) for ref in (x.q, x.k))
                qt, kt = q.T, k.T
                both = dot(jnp.concatenate([q, k], 0), kt)
                self.q.append(q)
                self.k.append(k)
                self.qt.append(qt)
                self.kt.append(kt)
                self.qk.append(both[:C] * p.scale)
                self.kq.append(dot(k, qt) * p.scale)
                self.kk.append(jnp.where(self.col > self.row, both[C:], 0.0))  # symmetric: [j, i], i > j
            self.dOt.append(self._tokens(x.dO, i).T)
            self.G.append(self._spread(0, i))
            self.u.append(tuple(x.u[0, self.n, i, n] for n in range(p.summands)))
            yield

    def _row(self, a: Array, i: int) -> Array:
        return a[i : i + 1]

    def solve(self) -> Iterator[None]:
        p, x, gates = self.p, self.x, self.gates
        distance = jnp.where(self.row >= self.col, self.row - self.col, 4 * C).astype(F32)
        self.du = []
        for i in range(p.heads):
            h = i // p.R
            D = jnp.exp2(jnp.where(distance < self._row(gates.ahead, i), self.G[i] - self._row(gates.G, i), -jnp.inf))
            self.dSt.append(x.dSt[i].astype(BF16))
            kend = (self.kt[h].astype(F32) * self._row(gates.end, i)).astype(BF16)
            dVn = self._mul(
                self._terms((self.dOt[i],), self._halves(self.qk[h] * D)), self._terms((self.dSt[i],), (kend,))
            )
            self.du.append(self._halves(dVn * self._row(gates.b, i)))
            yield

    def erase(self) -> Iterator[None]:
        p, x = self.p, self.x
        self.Y = []
        for i in range(p.heads):
            self.Y.append(self._mul(self._terms(self.du[i], tuple(x.M[0, self.n, i, n] for n in range(p.summands)))))
            yield

    def before(self) -> Iterator[None]:
        """What needs no cotangent of this chunk's own."""
        p, x, gates = self.p, self.x, self.gates
        self.udO, self.udS, self.dqs, self.through = [], [], [], []
        for i in range(p.heads):
            S = x.S[0, self.n, i]
            self.udO.append(self._mul(self._terms(self.u[i], (self.dOt[i],))))
            self.udS.append(self._mul(self._terms(self.u[i], (self.dSt[i],))))
            self.dqs.append(dot(S.astype(BF16), self.dOt[i]) * (self._row(gates.begin, i) * p.scale))
            kept = self._row(gates.begin, i)[:, C - 1 :]
            self.through.append(kept * _total(S.T * x.dSt[i]))
            yield

    def pairs(self) -> Iterator[None]:
        p, x, gates = self.p, self.x, self.gates
        self.uY, self.dks, self.uX = [], [], []
        for i in range(p.heads):
            h, begin = i // p.R, self._row(gates.begin, i)
            Y = self._halves(self.Y[i])
            self.uY.append(self._mul(self._terms(self.u[i], Y)))
            self.uX.append(jnp.sum(jnp.where(self.row == self.col, self.uY[i], 0.0), 0, keepdims=True))
            self.dks.append(self._mul(self._terms((x.S[0, self.n, i].astype(BF16),), Y)) * -begin)
            dOb = (self.dOt[i].astype(F32) * (begin * p.scale)).astype(BF16)
            Yb = self._halves(self.Y[i] * -begin)
            new = self._mul(self._terms((dOb,), (self.q[h],)), self._terms(Yb, (self.k[h],)))
            x.dSt[i] = x.dSt[i] * begin[:, C - 1 :] + new
            yield

    def keys(self) -> Iterator[None]:
        p, gates = self.p, self.gates
        distance = jnp.where(self.col >= self.row, self.col - self.row, 4 * C).astype(F32)
        self.dA, self.later, self.b, self.written = [], [], [], []
        for i in range(p.heads):
            h = i // p.R
            D = jnp.exp2(jnp.where(distance <= self._row(gates.run, i), self._row(gates.G, i) - self.G[i], -jnp.inf))
            # Lanes are rotated by the head's number, so that token 0 of each head lies in a lane of its own.
            rows = ((self.col - i) & (C - 1)) <= self.row
            W = self.udO[i] * D, jnp.where(self.col > self.row, self.uY[i] * -D, 0.0)
            pair = W[0] * self.kq[h] + W[1] * self.kk[h]
            ones = rows.astype(BF16)
            self.later.append(self._mul([(half, ones) for half in pieces(pair, 2)]))
            b = self._spread(2, i)
            self.b.append(b)
            self.dA.append((W[0] * (b * p.scale), W[1] * b))
            self.written.append(self._spread(1, i) * self.udS[i])
            yield

    def leave(self) -> Iterator[None]:
        p, x, gates = self.p, self.x, self.gates
        dg, read, db = [], [], jnp.zeros((C, C), F32)
        for i in range(p.heads):
            h = i // p.R
            k = self.k[h].astype(F32)
            yield
            own = self.later[i] + jnp.sum(k * self.written[i], 1, keepdims=True)
            db = jnp.where(self.col == i, own, db)
            earlier = jnp.where(self.row < ((self.col - i) & (C - 1)), own * self.b[i], 0.0)
            dg.append(pltpu.roll(jnp.sum(earlier, 0, keepdims=True), (C - i) % C, 1))
            q, k = self.qt[h].astype(F32), self.kt[h].astype(F32)
            read.append(jnp.sum(q * self.dqs[i] + k * self.dks[i], 0, keepdims=True))
            x.dv[0, self.here, i * C : (i + 1) * C] = self.Y[i].astype(x.dv.dtype).T
        total = jnp.concatenate(dg, 0) + _from_here_on(jnp.concatenate(read, 0)) + jnp.concatenate(self.through, 0)
        x.dg[0, 0, :, self.here] = jnp.where(gates.reset, 0.0, total)
        # u_j X_j, with X = Y / b: what the sum gives too, but there it may have cancelled.
        tiny = jnp.abs(gates.b) < 2.0**-60
        divided = jnp.concatenate(self.uX, 0) / jnp.where(tiny, 1.0, gates.b)
        x.db[0, 0, :, self.here] = jnp.where(tiny, db.T[: p.heads], divided)
        for h in range(p.P):
            mine = range(h * p.R, (h + 1) * p.R)
            add = lambda some: sum(some[1:], some[0])  # noqa: E731
            dA = [self._halves(add([self.dA[i][n] for i in mine])) for n in range(2)]
            wide = tuple(jnp.concatenate([a, b], 1) for a, b in zip(*dA, strict=True))
            back = self._mul(self._terms((self.kt[h],), wide))
            dq, dk = back[:, :C] + add([self.dqs[i] for i in mine]), back[:, C:] + add([self.dks[i] for i in mine])
            lanes = slice(h * C, (h + 1) * C)
            x.dq[0, self.here, lanes] = dq.astype(x.dq.dtype).T
            natural = self._mul(self._terms(dA[0], (self.q[h],)), self._terms(dA[1], (self.k[h],)))
            natural = natural + add([self.b[i] * self.written[i] for i in mine])
            x.dk[0, self.here, lanes] = (natural + dk.T).astype(x.dk.dtype)


def _kernel(p: Reverse, names: tuple[str, ...], *refs: Any) -> None:
    x = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    step = lax.rem(pl.program_id(1), jnp.int32(p.steps))

    @pl.when(step == 0)
    def _() -> None:
        x.dSt[...] = x.dS_last[0]

    # A chunk's last stages stand beside the first ones of the chunk before it.
    groups: dict[int, list[Iterator[None]]] = {}
    for u in reversed(range(p.U)):
        chunk = _Chunk(p, x, u, ((p.steps - 1 - step) * p.U + u) * C)
        solve, erase = [chunk.solve()], [chunk.erase()]
        (solve if p.summands == 1 else erase).append(chunk.before())  # where it was found to cost least
        stages = ([chunk.read()], solve, erase, [chunk.pairs()], [chunk.keys()], [chunk.leave()])
        for n, together in enumerate(stages):
            groups.setdefault((p.U - 1 - u) * OVERLAP + n, []).extend(together)
    for n in sorted(groups):
        phases = groups[n]
        while phases:
            phases = [phase for phase in phases if next(phase, phase) is not phase]

    @pl.when(step == p.steps - 1)
    def _() -> None:
        x.dS_first[0] = x.dSt[...]


def reverse(
    p: Reverse,
    q: Array,
    k: Array,
    g: Array,
    b: Array,
    S: Array,
    M: Array,
    u: Array,
    dO: Array,
    dS: Array,
    *,
    dtypes: tuple[Any, Any],
    interpret: Any = False,
) -> RuleGradients:
    """Cotangents of the bare rule's operands.

    Args:
        p: the plan.
        q, k: [B, T, H, 128] bfloat16; g, b: log decay and gate, [B, T, HV] float32.
        S, M, u: what the pipeline kept of each chunk: the state at its start [B, chunks, HV, 128, 128] float32, and
            [B, chunks, HV, summands, 128, 128] bfloat16.
        dO: [B, T, HV, 128] bfloat16.
        dS: of the final states, [B, HV, 128, 128] float32.
        dtypes: of the gradients of q and k, and of v.
    """
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731
    rows = lambda a: jnp.reshape(jnp.swapaxes(a, 1, 2), (p.B, p.groups, p.heads, p.T))  # noqa: E731

    def where(part: Array, entry: Array) -> tuple[Array, Array, Array]:
        rest, step = lax.div(entry, jnp.int32(p.steps)), lax.rem(entry, jnp.int32(p.steps))
        rest = rest + part * (p.entries // p.steps)
        return lax.div(rest, jnp.int32(p.groups)), lax.rem(rest, jnp.int32(p.groups)), p.steps - 1 - step

    def block(shape: tuple[int, ...], place: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda part, entry: place(*where(part, entry)))

    keys, values = (block((1, p.U * C, n * C), lambda r, h, c: (r, c, h)) for n in (p.P, p.heads))
    gate = block((1, 1, p.heads, p.U * C), lambda r, h, c: (r, h, 0, c))
    state = block((1, p.heads, C, C), lambda r, h, c: (r, h, 0, 0))
    held = block((1, p.U, p.heads, C, C), lambda r, h, c: (r, c, h, 0, 0))
    halves = block((1, p.U, p.heads, p.summands, C, C), lambda r, h, c: (r, c, h, 0, 0, 0))
    operands = {
        "q": (flat(q), keys), "k": (flat(k), keys), "g": (rows(g), gate), "b": (rows(b), gate),
        "S": (S, held), "M": (M, halves), "u": (u, halves), "dO": (flat(dO), values),
        "dS_last": (jnp.swapaxes(dS, -1, -2), state),
    }  # fmt: skip
    shape = jax.ShapeDtypeStruct
    results = {
        "dq": (shape((p.B, p.T, p.groups * p.P * C), dtypes[0]), keys),
        "dk": (shape((p.B, p.T, p.groups * p.P * C), dtypes[0]), keys),
        "dv": (shape((p.B, p.T, p.groups * p.heads * C), dtypes[1]), values),
        "dg": (shape((p.B, p.groups, p.heads, p.T), F32), gate),
        "db": (shape((p.B, p.groups, p.heads, p.T), F32), gate),
        "dS_first": (shape(dS.shape, F32), state),
    }
    out = pallas_call(
        partial(_kernel, p, (*operands, *results, "dSt")),
        name="gated_delta_rule_reverse",
        grid=(p.parts, p.entries),
        in_specs=[spec for _, spec in operands.values()],
        out_specs=[spec for _, spec in results.values()],
        out_shape=result_shapes([a for a, _ in results.values()], q),
        scratch_shapes=[pltpu.VMEM((p.heads, C, C), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=p.vmem),
        interpret=interpret,
    )(*(a for a, _ in operands.values()))
    heads = lambda a: jnp.reshape(a, (p.B, p.T, -1, C))  # noqa: E731
    per_head = lambda a: jnp.swapaxes(jnp.reshape(a, (p.B, -1, p.T)), 1, 2)[..., None]  # noqa: E731
    dq, dk, dv, dg, db, dS0 = out
    return RuleGradients(heads(dq), heads(dk), heads(dv), (per_head(dg), per_head(db)), jnp.swapaxes(dS0, -1, -2))
