"""The forward kernel for long sequences of heads that are a tile wide: chunks in a software pipeline.

A chunk's work is one long chain of dependent products, and the matrix unit takes products in program order: a head by
itself leaves it idle most of the time. So a grid step works on several heads, and of each on several chunks that are at
different stages; what the file has side by side is independent, and heads and phases alternate in program order.

| phase | chunk | what | unit |
|---|---|---|---|
| ``scores`` | c | decays, Akk, Aqk, k^T scaled for the state; diagonal blocks of 16, side by side | MXU, vector |
| ``solve_16`` | c - 1 | those blocks' inverses, by substitution, in float32 | XLU, vector |
| ``solve_64`` | c - 2 | joins blocks to 32, and begins to join them to 64 | MXU |
| ``solve_128`` | c - 3 | joins blocks to 64 and to 128: the whole inverse | MXU |
| ``advance`` | c - U | what the state and the chunk's own tokens give, the output, the next state | MXU, vector |

U chunks share a grid step, each with scratch of its own, so that the compiler sees which loads and stores concern each
other; chunk c's scratch is read by ``advance`` before ``scores`` fills it again.

The algebra differs from the specification's in one place: writing M = (I + L diag(b))^-1, where Akk = diag(b) L, the
inverse of the specification is T = diag(b) M diag(b)^-1, and Vn = diag(b) u with u = M (v - (k exp G) S). So gates only
ever scale columns of matrices, which a row of lanes does for nothing, and u takes Vn's place (b enters Aqk and k^T).
What must scale rows (exp G, and G itself in differences) is spread across the lanes by the matrix unit, from three
bfloat16 pieces that add up to the float32 value, bit for bit: the lane broadcast of the XLU takes four times as long.

A reset inside a chunk: row i sees columns j with i - j <= run_i, the number of tokens since the last reset, and 2^G
is 0 behind a reset for whatever comes from before the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...spec.stages import RESET
from ..plan import Pipeline
from . import inside

__all__ = ["forward"]

Array = Any
Parts = tuple[Array, ...]

C = 128  # tokens a chunk, lanes of a register, and the width of a head
F32, BF16 = jnp.float32, jnp.bfloat16
LOG2E = 1.4426950408889634
#: bfloat16 pieces of a float32 number that add up to it exactly.
PIECES = 3


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _block(index: Array, size: int) -> Array:
    """Number of the block of ``size`` (a power of two) that an index lies in. (``//`` asks which TPU it is lowered for,
    which nobody may know.)"""
    return index >> (size.bit_length() - 1)


def _within(index: Array, size: int) -> Array:
    """Place of an index in its block."""
    return index & (size - 1)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=F32)


def _halves(x: Array, count: int) -> Parts:
    """x float32 as ``count`` bfloat16 summands, the larger first."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(BF16))
        x = x - parts[-1].astype(F32)
    return tuple(parts)


def _product(p: Pipeline, a: Parts, b: Parts) -> Array:
    """a b, each one array or a sum of two.

    Four products of whole tiles fill a matrix unit of 256 x 256 twice as well as four by themselves: summands of a lie
    side by side, those of b in all four quarters. Elsewhere, and where a is narrower, summands of a are stacked, since
    they share what is loaded into the unit, and the two small summands' product is left out.
    """
    if len(a) == 1:
        return _dot(a[0], b[0])
    rows, depth = a[0].shape
    if depth == C and p.wide_mxu:
        wide = jnp.concatenate(b, 1)
        both = _dot(jnp.concatenate(a, 1), jnp.concatenate([wide, wide], 0))
        return both[:, :C] + both[:, C:]
    stacked = _dot(jnp.concatenate(a, 0), b[0])
    return stacked[:rows] + stacked[rows:] + _dot(a[0], b[1])


def _each(function: Any, *parts: Parts) -> Parts:
    """A rearrangement of each summand."""
    return tuple(function(*p) for p in zip(*parts, strict=True))


class _Gates(NamedTuple):
    """Of one chunk: heads in sublanes and tokens in lanes [heads, C], and what is to be spread from it.

    G: base-2 sum of log decays since the last reset; b: gate; into: what a token leaves in the state after the chunk,
    b 2^(G_C - G), 0 before a reset. As columns to be spread, float32 [C, heads] or bfloat16 pieces side by side
    [C, 3 heads]: sum, which is G; before, 2^G or 0 behind a reset; run, the number of tokens since the last reset.
    """

    G: Array
    b: Array
    into: Array
    sum: Array
    before: Array
    run: Array


def _gates(p: Pipeline, g: Array, b: Array) -> list[_Gates]:
    """Of several chunks, from log decays and gates [chunks heads, C]: the chain of rolls is waited for only once.

    To each right block of 1, 2, 4, ... tokens the last sum of the left one, as ``spec.stages.decay`` adds them: a gate
    of 0 leaves the sum as it was. ``last`` is the last reset in the token's block, up to it, or -1.
    """
    lane = _iota(g.shape, 1)
    reset = g < RESET
    last, G, size = jnp.where(reset, lane, -1), jnp.where(reset, 0.0, g) * LOG2E, 1
    while size < C:
        end_of_left = _block(lane, 2 * size) * (2 * size) + size - 1
        goes_on = (_within(lane, 2 * size) >= size) & (last < 0)
        G = G + jnp.where(goes_on, jnp.take_along_axis(G, end_of_left, axis=1), 0.0)
        last = jnp.where(goes_on, jnp.take_along_axis(last, end_of_left, axis=1), last)
        size *= 2
    before = jnp.where(last < 0, jnp.exp2(G), 0.0)
    seen = lane >= jnp.max(last, 1, keepdims=True)
    total = jnp.sum(jnp.where(lane == C - 1, G, 0.0), 1, keepdims=True)
    into = jnp.where(seen, b * jnp.exp2(jnp.where(seen, total - G, 0.0)), 0.0)
    # The matrix unit spreads what leaves the XLU free; with two summands it has more to do itself.
    exact = lambda a: [a]  # noqa: E731
    pieces = lambda a: [piece.astype(F32) for piece in _halves(a, PIECES)]  # noqa: E731
    by_xlu = p.summands > 1
    kinds = [
        pieces(G),
        (exact if by_xlu else pieces)(before),
        exact((lane - last).astype(F32)),  # which bfloat16 holds, too
    ]
    found = []
    for first in range(0, g.shape[0], p.heads):
        here = slice(first, first + p.heads)
        columns = jnp.concatenate([a[here] for kind in kinds for a in kind], 0).T
        cuts = [0]
        for kind in kinds:
            cuts.append(cuts[-1] + len(kind) * p.heads)
        sum_, before_, run = (columns[:, a:b] for a, b in pairwise(cuts))
        if not by_xlu:
            before_, run = before_.astype(BF16), run.astype(BF16)
        found.append(_Gates(G[here], b[here], into[here], sum_.astype(BF16), before_, run))
    return found


def _spread(columns: Array, heads: int, head: int) -> Array:
    """A head's column over the lanes: float32 by the XLU, pieces of it by the matrix unit, which adds them up."""
    if columns.dtype == F32:
        return jnp.broadcast_to(columns[:, head : head + 1], (C, C))
    row = _iota((columns.shape[1], C), 0)
    return _dot(columns, (lax.rem(row, jnp.int32(heads)) == head).astype(BF16))


class _Slot(NamedTuple):
    """Scratch of one chunk, from its ``scores`` to its ``advance``; heads first, then summands where there are some."""

    before: Any  # a column a head, of 2^G, 0 behind a reset; see _Gates
    Aqk: Any  # [heads, n, C, C]
    kt: Any  # [heads, n, C, C]
    packed: Any  # [heads, 16, C] float32: diagonal blocks of 16, then their inverses
    low16: Any  # [heads, n, 16, C]: Akk between blocks of 16 of one block of 32
    low32: Any  # [heads, n, 32, C]: between blocks of 32 of one block of 64, the second pair rolled beside the first
    low64: Any  # [heads, n, 64, C]: between the two blocks of 64, in the first 64 lanes
    M: Any  # [heads, n, C, C]; before it is whole, blocks of 32 side by side and the product for the next level
    q: Any = None  # [P, C, C] bfloat16, and k, where they are not what lies in HBM
    k: Any = None
    v: Any = None  # [heads, C, C] float32, behind a convolution


def _slot_shapes(p: Pipeline) -> list[Any]:
    wide = lambda rows: pltpu.VMEM((p.heads, p.summands, rows, C), BF16)  # noqa: E731
    return [
        pltpu.VMEM((C, p.heads), F32) if p.summands > 1 else pltpu.VMEM((C, PIECES * p.heads), BF16),
        wide(C), wide(C), pltpu.VMEM((p.heads, 16, C), F32), wide(16), wide(32), wide(64), wide(C),
        *[pltpu.VMEM((p.P, C, C), BF16)] * (2 if p.keeps_keys else 0),
        *[pltpu.VMEM((p.heads, C, C), F32)] * (1 if p.inside.width else 0),
    ]  # fmt: skip


def _write(ref: Any, head: int, parts: Parts, rows: slice = slice(None)) -> None:
    for n, part in enumerate(parts):
        ref[head, n, rows] = part


def _read(ref: Any, head: int, rows: slice = slice(None)) -> Parts:
    return tuple(ref[head, n, rows] for n in range(ref.shape[1]))


class _Chunk:
    """The phases of one chunk of a grid step, as generators that stop where a product's result is awaited."""

    def __init__(
        self,
        p: Pipeline,
        x: SimpleNamespace,
        slots: list[_Slot],
        gates: list[_Gates],
        u: int,
        scored: Array,
        advanced: Array,
    ) -> None:
        """``scored``, ``advanced``: the first token of the grid step for the phases of these names."""
        self.p, self.x, self.slots, self.gates, self.u = p, x, slots, gates, u
        self.scored, self.advanced = scored, advanced
        self.row, self.col = _iota((C, C), 0), _iota((C, C), 1)

    def _head(self, ref: Any, h: int) -> Array:
        """Tokens of the chunk of a head [C, 128], as they lie in the block."""
        return ref[0, self.u * C : (self.u + 1) * C, h * C : (h + 1) * C]

    def _inside(self, first: Array) -> Array:
        """Which rows of the chunk [C, C] are tokens that there are: the last chunks may reach beyond T."""
        return self.row + (first + self.u * C) < self.p.T

    def _block_diagonal(self, x: Array, size: int) -> Array:
        """[size, C] blocks side by side as a block-diagonal [C, C]."""
        return jnp.where(
            _block(self.row, size) == _block(self.col, size),
            jnp.concatenate([x] * (C // size), 0),
            jnp.zeros((), x.dtype),
        )

    def _gates(self) -> _Gates:
        """Those of every chunk of the step are computed with the first."""
        if self.u == 0:
            p, x = self.p, self.x
            g, b = (jnp.concatenate([ref[0, 0, :, u * C : (u + 1) * C] for u in range(p.U)], 0) for ref in (x.g, x.b))
            if p.inside.gate:
                columns = [jnp.concatenate([x.gate[0, :, n : n + 1]] * p.U, 0) for n in range(2)]
                g = inside.log_decay(p.inside, g, columns)
            if p.tail:
                token = self.scored + lax.div(_iota(g.shape, 0), jnp.int32(p.heads)) * C + _iota(g.shape, 1)
                g, b = jnp.where(token < p.T, g, 0.0), jnp.where(token < p.T, b, 0.0)
            self.gates[:] = _gates(p, g, b)
        return self.gates[self.u]

    def _operand(self, name: str, h: int) -> Array:
        """q, k or v of a head [C, 128] behind convolution and norm: float32 if there is either."""
        p, x = self.p, self.x
        if p.inside.width:
            window, taps = getattr(x, f"{name}_window"), getattr(x, f"{name}_taps")
            a = inside.convolved(p.inside, window, taps, self.u * C, C, h)
        else:
            a = self._head(getattr(x, name), h)
        if p.inside.norm and name in "qk":
            a = inside.normalised(a.astype(F32))
        return a

    def _keys(self, h: int) -> Array:
        """q above k [2 C, 128] bfloat16, rows of k that are no tokens 0."""
        q, k = (self._operand(name, h).astype(BF16) for name in "qk")
        if self.p.tail:
            k = jnp.where(self._inside(self.scored), k, jnp.zeros((), k.dtype))
        return jnp.concatenate([q, k], 0)

    def scores(self) -> Iterator[None]:
        p, slot = self.p, self.slots[self.u]
        heads, both, v, kts, qk, G, run = range(p.heads), [], [], [], [], [], []
        gates = self._gates()
        for i in heads:
            if i % p.R == 0:
                both.append(self._keys(i // p.R))
            v.append(self._operand("v", i) if p.inside.width else None)
            if not p.keeps_keys:
                self._score(i, both, kts, qk)
            yield
        for i in heads:
            if p.keeps_keys:  # a round later, since they took a while to come about
                self._score(i, both, kts, qk)
            G.append(_spread(gates.sum, p.heads, i))
            run.append(_spread(gates.run, p.heads, i))
            yield
        for _ in heads:  # what follows writes what ``advance`` reads before
            yield
        slot.before[...] = gates.before
        distance = jnp.where(self.row >= self.col, self.row - self.col, 2 * C).astype(F32)
        for i in heads:
            h = i // p.R
            seen = distance <= run[i]
            D = jnp.exp2(jnp.where(seen, G[i] - gates.G[i : i + 1], -jnp.inf)) * gates.b[i : i + 1]
            _write(slot.Aqk, i, _halves(qk[h][:C] * D, p.summands))
            _write(slot.kt, i, _halves(kts[h].astype(F32) * gates.into[i : i + 1], p.summands))
            self._write_blocks(slot, i, qk[h][C:] * D)
            if p.keeps_keys and i % p.R == 0:
                slot.q[h], slot.k[h] = both[h][:C], both[h][C:]
            if p.inside.width:
                slot.v[i] = v[i]
            yield

    def _score(self, i: int, both: list[Array], kts: list[Array], qk: list[Array]) -> None:
        """[q; k] k^T, once for the value heads that share them."""
        if i % self.p.R == 0:
            kts.append(both[i // self.p.R][C:].T)
            qk.append(_dot(both[i // self.p.R], kts[-1]))

    def _write_blocks(self, slot: _Slot, i: int, A: Array) -> None:
        """The blocks of A that the inverse is built from, each level's side by side."""
        lane16, lane32, n = _iota((16, C), 1), _iota((32, C), 1), self.p.summands
        packed, low16 = A[:16], A[16:32]
        for j in range(1, 8):
            packed = jnp.where(_block(lane16, 16) == j, A[16 * j : 16 * j + 16], packed)
        for j in range(1, 4):
            low16 = jnp.where(_block(lane16, 32) == j, A[32 * j + 16 : 32 * j + 32], low16)
        slot.packed[i] = jnp.where(_iota((16, C), 0) > _within(lane16, 16), packed, 0.0)
        _write(slot.low16, i, _halves(jnp.where(_within(lane16, 32) < 16, low16, 0.0), n))
        _write(slot.low32, i, _halves(jnp.where(lane32 < 32, A[32:64], pltpu.roll(A[96:], C - 32, 1)), n))
        _write(slot.low64, i, _halves(A[64:], n))

    def solve_16(self) -> Iterator[None]:
        """Forward substitution: column j of every block is final after j steps."""
        p, slot = self.p, self.slots[(self.u - 1) % self.p.U]
        row, lane = _iota((16, C), 0), _iota((16, C), 1)
        A = [slot.packed[i] for i in range(p.heads)]
        X = [(row == _within(lane, 16)).astype(F32)] * p.heads
        for j in range(15):
            columns = [jnp.take_along_axis(a, _block(lane, 16) * 16 + j, axis=1) for a in A]
            X = [a - c * jnp.broadcast_to(a[j : j + 1], a.shape) for a, c in zip(X, columns, strict=True)]
            yield
        for i in range(p.heads):
            slot.packed[i] = X[i]
        yield

    def solve_64(self) -> Iterator[None]:
        p, slot = self.p, self.slots[(self.u - 2) % self.p.U]
        heads, low, X = range(p.heads), [], []
        zero = jnp.zeros((), BF16)
        lane16, lane32 = _iota((16, C), 1), _iota((32, C), 1)
        for i in heads:
            X.append(_halves(slot.packed[i], p.summands))
            diagonal = lambda a: self._block_diagonal(a, 16)  # noqa: E731
            low.append(_product(p, _read(slot.low16, i), _each(diagonal, X[i])))
            yield
        second = _block(self.row, 32) == _block(self.col, 32)
        second &= (_within(self.row, 32) >= 16) & (_within(self.col, 32) < 16)
        place = lambda a: jnp.where(second, jnp.concatenate([a] * 8, 0), zero)  # noqa: E731
        for i in heads:
            low[i] = _product(p, X[i], _each(place, _halves(low[i], p.summands)))
            yield
        odd = _within(lane16, 32) >= 16
        join = lambda a, b: jnp.concatenate([jnp.where(odd, zero, a), jnp.where(odd, a, -b)], 0)  # noqa: E731
        firsts = lambda a: jnp.concatenate(  # noqa: E731
            [jnp.where(lane32 < 32, a, zero), jnp.where((lane32 >= 64) & (lane32 < 96), a, zero)], 0
        )
        for i in heads:
            X[i] = _each(join, X[i], _halves(low[i], p.summands))
            low[i] = _product(p, _each(lambda a: a[:, :64], _read(slot.low32, i)), _each(firsts, X[i]))
            yield
        for i in heads:
            _write(slot.M, i, X[i], slice(0, 32))
            _write(slot.M, i, _halves(low[i], p.summands), slice(32, 64))
            yield

    def solve_128(self) -> Iterator[None]:
        p, slot = self.p, self.slots[(self.u - 3) % self.p.U]
        heads, X, low = range(p.heads), [], []
        zero = jnp.zeros((), BF16)
        lane32, lane64 = _iota((32, C), 1), _iota((64, C), 1)
        second = (_block(self.row, 64) == _block(self.col, 64)) & (_within(self.row, 64) >= 32)
        second &= _within(self.col, 64) < 32
        place = lambda a: jnp.where(second, jnp.concatenate([a] * 4, 0), zero)  # noqa: E731
        for i in heads:
            X.append(_read(slot.M, i, slice(0, 32)))
            low.append(_product(p, X[i], _each(place, _read(slot.M, i, slice(32, 64)))))
            yield
        odd = _within(lane32, 64) >= 32
        join = lambda a, b: jnp.concatenate([jnp.where(odd, zero, a), jnp.where(odd, a, -b)], 0)  # noqa: E731
        for i in heads:
            X[i] = _each(join, X[i], _halves(low[i], p.summands))
            low[i] = _product(p, _each(lambda a: a[:, :64], _read(slot.low64, i)), X[i])
            yield
        left = lane64 < 64
        below = lambda a: jnp.concatenate([jnp.zeros((64, C), BF16), jnp.where(left, a, zero)], 0)  # noqa: E731
        for i in heads:
            low[i] = _product(p, X[i], _each(below, _halves(low[i], p.summands)))
            yield
        for i in heads:
            _write(slot.M, i, _each(lambda a: jnp.where(left, a, zero), X[i]), slice(0, 64))
            whole = _each(lambda a, b: jnp.where(left, -b, a), X[i], _halves(low[i], p.summands))
            _write(slot.M, i, whole, slice(64, C))
            yield

    def advance(self) -> Iterator[None]:
        p, x, slot = self.p, self.x, self.slots[self.u]
        heads, S, from_state, before, u = range(p.heads), [], [], [], []
        for i in heads:
            S.append(x.S[i])
            if i % p.R == p.R - 1:
                h = i // p.R
                keys = (slot.q[h], slot.k[h]) if p.keeps_keys else (self._head(x.q_late, h), self._head(x.k_late, h))
                qk = jnp.concatenate(keys, 0)
                wide = _dot(qk, jnp.concatenate([a.astype(BF16) for a in S[h * p.R :]], 1))
                from_state += [wide[:, r * C : (r + 1) * C] for r in range(p.R)]
            before.append(_spread(slot.before[...], p.heads, i))
            yield
        for i in heads:
            v = slot.v[i] if p.inside.width else self._head(x.v_late, i).astype(F32)
            rest = v - from_state[i][C:] * before[i]
            if p.tail:
                rest = jnp.where(self._inside(self.advanced), rest, 0.0)
            u.append(_product(p, _read(slot.M, i), _halves(rest, p.summands)))
            yield
        stack = lambda a, b: jnp.concatenate([a, b], 0)  # noqa: E731
        for i in heads:
            both = _each(stack, _read(slot.Aqk, i), _read(slot.kt, i))
            u[i] = _product(p, both, _halves(u[i], p.summands))
            yield
        for i in heads:
            o = (from_state[i][:C] * before[i] + u[i][:C]) * p.scale
            x.o[0, self.u * C : (self.u + 1) * C, i * C : (i + 1) * C] = o.astype(x.o.dtype)
            x.S[i] = S[i] * before[i][C - 1 :] + u[i][C:]
            yield


def _kernel(p: Pipeline, names: tuple[str, ...], *refs: Any) -> None:
    x, scratch = SimpleNamespace(**dict(zip(names, refs, strict=False))), refs[len(names) :]
    size = len(scratch) // p.U
    slots = [_Slot(*scratch[n * size : (n + 1) * size]) for n in range(p.U)]
    entry = pl.program_id(1)
    scored, advanced = (lax.rem(at, jnp.int32(p.steps)) for at in (_now(p, entry), _late(entry)))

    @pl.when(advanced == 0)
    def _() -> None:
        x.S[...] = x.S_first[0]

    if p.inside.width:
        _fill_windows(p, x, scored == 0)
    gates: list[_Gates] = []
    for u in range(p.U):
        chunk = _Chunk(p, x, slots, gates, u, scored * (p.U * C), advanced * (p.U * C))
        # The order decides what the units get first; of those that were compiled, this one costs least.
        phases = [chunk.advance(), chunk.solve_128(), chunk.scores(), chunk.solve_64(), chunk.solve_16()]
        while phases:
            phases = [phase for phase in phases if next(phase, phase) is not phase]

    @pl.when(advanced == p.steps - 1)
    def _() -> None:
        x.S_last[0] = x.S[...]


def _fill_windows(p: Pipeline, x: SimpleNamespace, first: Array) -> None:
    """The step's tokens in float32, behind the last ones of the step before, or what came before the sequence."""
    tokens = p.U * C
    windows = [(getattr(x, f"{name}_window"), getattr(x, f"{name}_past"), getattr(x, name)) for name in "qkv"]
    for window, _, _ in windows:
        window[:, : inside.HISTORY] = window[:, tokens : tokens + inside.HISTORY]

    @pl.when(first)
    def _() -> None:
        for window, past, _ in windows:
            for h in range(window.shape[0]):
                window[h, : inside.HISTORY] = past[0, :, h * C : (h + 1) * C]

    for window, _, now in windows:
        for h in range(window.shape[0]):
            window[h, inside.HISTORY :] = now[0, :, h * C : (h + 1) * C].astype(F32)


def _now(p: Pipeline, entry: Array) -> Array:
    """What ``scores`` works on in a grid step: row, group and step of a sequence in one number, the last one twice."""
    return jnp.minimum(entry, p.entries - 1)


def _late(entry: Array) -> Array:
    """What ``advance`` works on; in the first step it is the first, on scratch that holds nothing yet, and again in the
    second, when it holds what it should."""
    return jnp.maximum(entry - 1, 0)


class Channels(NamedTuple):
    """q, k or v: an array whose last axis holds its channels, from the given one on; heads side by side."""

    array: Array
    first: int


def forward(
    p: Pipeline,
    q: Channels,
    k: Channels,
    v: Channels,
    g: Array,
    b: Array,
    S: Array,
    *,
    taps: tuple[Channels, Channels, Channels] | None = None,
    past: tuple[Channels, Channels, Channels] | None = None,
    gate: tuple[Array, Array] | None = None,
    dtype: Any,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """The rule, and before it what the plan has inside.

    Args:
        p: the plan.
        q, k, v: [B, T, channels]; bfloat16 q and k, unless there is a norm or a convolution before them.
        g, b: log decay, or the gate's raw projection, and beta, [B, T, HV] float32.
        S: states that the rows start from, [B, HV, 128, 128] float32.
        taps: of q, k and v, [``inside.tap_rows``, channels] float32.
        past: the 8 inputs before the first of each row, of q, k and v, [B, 8, channels] float32.
        gate: A_log and dt_bias [HV] float32.
        dtype: of o.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.

    Returns:
        o [B, T, HV, 128] and the final states.
    """
    tokens, keys, values = p.U * C, p.P * C, p.heads * C
    now = partial(_now, p)

    def where(part: Array, at: Array) -> tuple[Array, Array, Array]:
        """Row, group of heads and step of an entry of one of the parts that cores share."""
        rest, step = lax.div(at, jnp.int32(p.steps)), lax.rem(at, jnp.int32(p.steps))
        rest = rest + part * (p.entries // p.steps)
        return lax.div(rest, jnp.int32(p.groups)), lax.rem(rest, jnp.int32(p.groups)), step

    def block(shape: tuple[int, ...], when: Any, place: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda part, entry: place(*where(part, when(entry))))

    operands: dict[str, tuple[Array, pl.BlockSpec]] = {}

    def channels(name: str, x: Channels, width: int, rows: int, when: Any, place: Any) -> None:
        """A block of ``width`` channels; where they do not begin at a multiple of it, they are cut out before."""
        array, first = x
        if first % width:
            array, first = lax.slice_in_dim(array, first, first + p.groups * width, axis=-1), 0
        shape = (rows, width) if array.ndim == 2 else (1, rows, width)
        operands[name] = array, block(shape, when, lambda r, h, c: place(r, h + first // width, c))

    late = not p.keeps_keys
    widths = {"q": keys, "k": keys, "v": values}
    sequence = lambda r, h, c: (r, c, h)  # noqa: E731
    for name, x in (("q", q), ("k", k), ("v", v)):
        if name != "v" or p.inside.width:
            channels(name, x, widths[name], tokens, now, sequence)
        if late if name != "v" else not p.inside.width:
            channels(f"{name}_late", x, widths[name], tokens, _late, sequence)
        if p.inside.width:
            assert taps is not None
            assert past is not None
            n = "qkv".index(name)
            channels(f"{name}_taps", taps[n], widths[name], taps[n].array.shape[0], now, lambda r, h, c: (0, h))
            channels(f"{name}_past", past[n], widths[name], inside.HISTORY, now, lambda r, h, c: (r, 0, h))
    for name, x in (("g", g), ("b", b)):
        rows = jnp.reshape(jnp.swapaxes(x, 1, 2), (p.B, p.groups, p.heads, p.T))
        operands[name] = rows, block((1, 1, p.heads, tokens), now, lambda r, h, c: (r, h, 0, c))
    if p.inside.gate:
        assert gate is not None
        columns = jnp.reshape(jnp.stack(gate, 1), (p.groups, p.heads, 2))
        operands["gate"] = columns, block((1, p.heads, 2), now, lambda r, h, c: (h, 0, 0))
    state = block((1, p.heads, C, C), _late, lambda r, h, c: (r, h, 0, 0))
    operands["S_first"] = S, state
    windows = {f"{name}_window": widths[name] for name in ("qkv" if p.inside.width else "")}
    o, final = pl.pallas_call(
        partial(_kernel_in_order, p, tuple(operands), tuple(windows)),
        name="gated_delta_rule_pipeline",
        grid=(p.parts, p.entries + 1),
        in_specs=[spec for _, spec in operands.values()],
        out_specs=[block((1, tokens, values), _late, sequence), state],
        out_shape=[
            jax.ShapeDtypeStruct((p.B, p.T, p.groups * values), dtype),
            jax.ShapeDtypeStruct(S.shape, F32),
        ],
        scratch_shapes=[
            pltpu.VMEM((p.heads, C, C), F32),
            *(pltpu.VMEM((width // C, inside.HISTORY + tokens, C), F32) for width in windows.values()),
            *_slot_shapes(p) * p.U,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=p.vmem),
        interpret=interpret,
    )(*(array for array, _ in operands.values()))
    return jnp.reshape(o, (p.B, p.T, p.groups * p.heads, C)), final


def _kernel_in_order(p: Pipeline, operands: tuple[str, ...], windows: tuple[str, ...], *refs: Any) -> None:
    _kernel(p, (*operands, "o", "S_last", "S", *windows), *refs)
