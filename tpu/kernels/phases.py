"""The phases of one chunk in the pipeline; ``pipeline`` says which there are and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ...spec.stages import RESET
from ..pipeline_plan import Pipeline, Span
from . import inside
from .halves import (
    BF16,
    F32,
    LOG2E,
    PIECES,
    C,
    Parts,
    block_of,
    dot,
    each,
    exact_pieces,
    halves,
    iota,
    kept,
    product,
    spread,
    within,
)

__all__ = ["Chunk", "Gates", "Part", "Slot", "placed", "read", "slot_shapes", "write"]

Array = Any


class Gates(NamedTuple):
    """Of one chunk: decays in sublanes and tokens in lanes [decays, C], and what is to be spread from it. A head has
    one decay, or one for each group of its key channels; heads side by side.

    G: base-2 sum of log decays since the last reset; b: gate; into: what a token leaves in the state after the chunk,
    b 2^(G_C - G), 0 before a reset. As columns to be spread, float32 [C, decays] or bfloat16 pieces side by
    side [C, 3 decays]: sum, which is G; before, 2^G or 0 behind a reset; run, the number of tokens since a reset.
    """

    G: Array
    b: Array
    into: Array
    sum: Array
    before: Array
    run: Array


class Part(NamedTuple):
    """Of the block of C tokens that a chunk lies in: the rows that are its own, and of packed sequences, whether it is
    a sequence's first chunk, and the first one in its block. Scalars."""

    begin: Any
    end: Any
    first: Any = None
    fresh: Any = None


def _spread_by_xlu(p: Pipeline) -> bool:
    return p.precision != "fast"


def _gates(p: Pipeline, g: Array, b: Array) -> list[Gates]:
    """Of several chunks, from log decays and gates [chunks decays, C]: the chain of rolls is waited for only once.

    To each right block of 1, 2, 4, ... tokens the last sum of the left one, as ``spec.stages.decay`` adds them: a gate
    of 0 leaves the sum as it was. ``last`` is the last reset in the token's block, up to it, or -1.
    """
    lane = iota(g.shape, 1)
    reset = g < RESET
    last, G, size = jnp.where(reset, lane, -1), jnp.where(reset, 0.0, g) * LOG2E, 1
    while size < C:
        end_of_left = block_of(lane, 2 * size) * (2 * size) + size - 1
        goes_on = (within(lane, 2 * size) >= size) & (last < 0)
        G = G + jnp.where(goes_on, jnp.take_along_axis(G, end_of_left, axis=1), 0.0)
        last = jnp.where(goes_on, jnp.take_along_axis(last, end_of_left, axis=1), last)
        size *= 2
    before = jnp.where(last < 0, jnp.exp2(G), 0.0)
    seen = lane >= jnp.max(last, 1, keepdims=True)
    total = jnp.sum(jnp.where(lane == C - 1, G, 0.0), 1, keepdims=True)
    into = jnp.where(seen, b * jnp.exp2(jnp.where(seen, total - G, 0.0)), 0.0)
    # The matrix unit spreads what leaves the XLU free; where products are not rounded it has more to do itself.
    exact = lambda a: [a]  # noqa: E731
    several = lambda a: [piece.astype(F32) for piece in exact_pieces(a)]  # noqa: E731
    by_xlu = _spread_by_xlu(p)
    kinds = [
        several(G),
        (exact if by_xlu else several)(before),
        exact((lane - last).astype(F32)),  # which bfloat16 holds, too
    ]
    found = []
    of_chunk = p.heads * p.decays
    for first in range(0, g.shape[0], of_chunk):
        here = slice(first, first + of_chunk)
        columns = jnp.concatenate([a[here] for kind in kinds for a in kind], 0).T
        cuts = [0]
        for kind in kinds:
            cuts.append(cuts[-1] + len(kind) * of_chunk)
        sum_, before_, run = (columns[:, a:b] for a, b in pairwise(cuts))
        if not by_xlu:
            before_, run = before_.astype(BF16), run.astype(BF16)
        found.append(Gates(G[here], b[here], into[here], sum_.astype(BF16), before_, run))
    return found


class Slot(NamedTuple):
    """Scratch of one chunk, from its ``scores`` to its ``advance``; heads first, then summands where there are some."""

    before: Any  # a column a head, of 2^G, 0 behind a reset; see Gates
    Aqk: Any  # [heads, n, C, C]
    kt: Any  # [heads, n, key lanes, C]
    packed: Any  # [heads, 16, C] float32: diagonal blocks of 16, then their inverses
    low16: Any  # [heads, n, 16, C]: Akk between blocks of 16 of one block of 32
    low32: Any  # [heads, n, 32, C]: between blocks of 32 of one block of 64, the second pair rolled beside the first
    low64: Any  # [heads, n, 64, C]: between the two blocks of 64, in the first 64 lanes
    M: Any  # [heads, n, C, C]; before it is whole, blocks of 32 side by side and the product for the next level
    q: Any = None  # [P, C, key lanes], and k, where they are not what lies in HBM
    k: Any = None
    v: Any = None  # [heads, C, value lanes] float32, behind a convolution


def slot_shapes(p: Pipeline) -> list[Any]:
    """A slot's scratch, in order."""
    wide = lambda rows: pltpu.VMEM((p.heads, p.summands, rows, C), kept(p))  # noqa: E731
    return [
        pltpu.VMEM((C, p.heads * p.decays), F32) if _spread_by_xlu(p) else
        pltpu.VMEM((C, PIECES * p.heads * p.decays), BF16),
        wide(C), wide(p.key_lanes), pltpu.VMEM((p.heads, 16, C), F32), wide(16), wide(32), wide(64), wide(C),
        *[pltpu.VMEM((p.P, C, p.key_lanes), kept(p))] * (2 if p.changes_keys else 0),
        *[pltpu.VMEM((p.heads, C, p.value_lanes), F32)] * (1 if p.inside.width else 0),
    ]  # fmt: skip


def placed(a: Array, key: Span, value: Span) -> Array:
    """A state [K, V] among zeros, at the place of its channels in whole tiles."""
    for axis, span in ((1, value), (0, key)):
        parts = [a]
        if span.low:
            parts.insert(0, jnp.zeros([span.low if n == axis else m for n, m in enumerate(a.shape)], a.dtype))
        if span.high < span.lanes:
            parts.append(
                jnp.zeros([span.lanes - span.high if n == axis else m for n, m in enumerate(a.shape)], a.dtype)
            )
        a = jnp.concatenate(parts, axis) if len(parts) > 1 else a
    return a


def _widened(a: Array, lanes: int) -> Array:
    """[rows, C] with every lane of a row alike, to more lanes."""
    return jnp.concatenate([a] * (lanes // C), 1) if lanes > C else a


def _sum(terms: Sequence[Array]) -> Array:
    return sum(terms[1:], terms[0])


def write(ref: Any, head: int, parts: Parts, rows: slice = slice(None)) -> None:
    for n, part in enumerate(parts):
        ref[head, n, rows] = part


def read(ref: Any, head: int, rows: slice = slice(None)) -> Parts:
    return tuple(ref[head, n, rows] for n in range(ref.shape[1]))


class Chunk:
    """The phases of one chunk of a grid step, as generators that stop where a product's result is awaited."""

    def __init__(
        self,
        p: Pipeline,
        x: SimpleNamespace,
        slots: list[Slot],
        gates: list[Gates],
        u: int,
        scored: list[Part],
        advanced: list[Part],
    ) -> None:
        """``scored``, ``advanced``: where the step's chunks lie for the phases of these names."""
        self.p, self.x, self.slots, self.gates, self.u = p, x, slots, gates, u
        self.scored, self.advanced = scored, advanced[u]
        self.row, self.col = iota((C, C), 0), iota((C, C), 1)
        self.tiles: dict[tuple[str, int], Array] = {}

    def _own(self, part: Part, index: Array) -> Array:
        """Which of the block's rows are the chunk's."""
        return (index >= part.begin) & (index < part.end) if self.p.packed else index < part.end

    def _rows(self, part: Part, a: Array) -> Array:
        """a [C, lanes] with 0 in rows that are not the chunk's."""
        return jnp.where(self._own(part, iota(a.shape, 0)), a, jnp.zeros((), a.dtype)) if self.p.masked else a

    def _lanes(self, span: Span, a: Array) -> Array:
        """a [C, lanes of the span's tiles] with 0 in the lanes of neighbours."""
        if span.whole:
            return a
        lane = iota(a.shape, 1)
        return jnp.where((lane >= span.low) & (lane < span.high), a, jnp.zeros((), a.dtype))

    def _loaded(self, name: str, tile: int) -> Array:
        """128 channels of the chunk's block, as they lie there."""
        ref, first = self.x.blocks[name][self.u]
        return ref[0, first : first + C, tile * C : (tile + 1) * C]

    def _head(self, name: str, span: Span) -> Array:
        """A head's channels in whole tiles, as they lie in the block."""
        tiles = [self._loaded(name, span.first + n) for n in range(span.tiles)]
        return self._lanes(span, jnp.concatenate(tiles, 1) if len(tiles) > 1 else tiles[0])

    def _block_diagonal(self, x: Array, size: int) -> Array:
        """[size, C] blocks side by side as a block-diagonal [C, C]."""
        return jnp.where(
            block_of(self.row, size) == block_of(self.col, size),
            jnp.concatenate([x] * (C // size), 0),
            jnp.zeros((), x.dtype),
        )

    def _gates(self) -> Gates:
        """Those of every chunk of the step are computed with the first."""
        if self.u == 0:
            p, x = self.p, self.x
            take = lambda ref, first: ref[0, 0, :, first : first + C]  # noqa: E731
            rows, n = p.heads * p.decays, p.decays
            g, b = (jnp.concatenate([take(*block) for block in x.blocks[name]], 0) for name in "gb")
            if n > 1:  # its head's for every decay
                b = jnp.concatenate([b[i : i + 1] for i in range(b.shape[0]) for _ in range(n)], 0)
            if p.inside.gate:
                columns = [jnp.concatenate([x.gate[0, :, n : n + 1]] * p.U, 0) for n in range(2)]
                g = inside.log_decay(p.inside, g, columns)
            if p.masked:
                chunk, begin, end = lax.div(iota(g.shape, 0), jnp.int32(rows)), 0, self.scored[0].end
                for u in range(1, p.U):
                    end = jnp.where(chunk == u, self.scored[u].end, end)
                if p.packed:
                    for u in range(p.U):
                        begin = jnp.where(chunk == u, self.scored[u].begin, begin)
                own = self._own(Part(begin, end), iota(g.shape, 1))
                g, b = jnp.where(own, g, 0.0), jnp.where(own, b, 0.0)
            self.gates[:] = _gates(p, g, b)
        return self.gates[self.u]

    def _convolved(self, name: str, tile: int) -> Array:
        """128 channels behind the convolution; a tile that heads share is computed with the first of them."""
        if (name, tile) not in self.tiles:
            window, first = self.x.windows[name][self.u]
            taps = getattr(self.x, f"{name}_taps")
            self.tiles[name, tile] = inside.convolved(self.p.inside, window, taps, first, C, tile)
        return self.tiles[name, tile]

    def _operand(self, name: str, span: Span) -> Array:
        """q, k or v of a head in whole tiles, behind convolution and norm: float32 if there is either."""
        p = self.p
        if p.inside.width:
            tiles = [self._convolved(name, span.first + n) for n in range(span.tiles)]
            a = self._lanes(span, jnp.concatenate(tiles, 1) if len(tiles) > 1 else tiles[0])
        else:
            a = self._head(name, span)
        if p.inside.norm and name in "qk":
            a = inside.normalised(a.astype(F32))
        return a

    def _keys(self, h: int) -> Array:
        """q above k [2 C, lanes]; rows of k, and of q where scores are kept, that are no tokens of the chunk 0."""
        q, k = (self._operand(name, self.p.keys[h]).astype(kept(self.p)) for name in "qk")
        if "Aqk" in self.p.keeps:
            q = self._rows(self.scored[self.u], q)
        return jnp.concatenate([q, self._rows(self.scored[self.u], k)], 0)

    def _groups(self, h: int) -> list[slice]:
        """Channels of a key head's lanes that share a decay: all, or whole tiles."""
        width = self.p.keys[h].lanes // self.p.decays
        return [slice(n * width, (n + 1) * width) for n in range(self.p.decays)]

    def _spread(self, columns: Array, i: int) -> list[Array]:
        """A head's columns over the lanes, a decay each."""
        p = self.p
        return [spread(columns, p.heads * p.decays, i * p.decays + n) for n in range(p.decays)]

    def scores(self) -> Iterator[None]:
        p, slot = self.p, self.slots[self.u]
        heads, both, v, kts, qk, G, run = range(p.heads), [], [], [], [], [], []
        gates = self._gates()
        for i in heads:
            if i % p.R == 0:
                both.append(self._keys(i // p.R))
            v.append(self._operand("v", p.values[i]) if p.inside.width else None)
            if not p.changes_keys:
                self._score(i, both, kts, qk)
            yield
        for i in heads:
            if p.changes_keys:  # a round later, since they took a while to come about
                self._score(i, both, kts, qk)
            G.append(self._spread(gates.sum, i))
            run.append(self._spread(gates.run, i))
            yield
        for _ in heads:  # what follows writes what ``advance`` reads before
            yield
        slot.before[...] = gates.before
        distance = jnp.where(self.row >= self.col, self.row - self.col, 2 * C).astype(F32)
        for i in heads:
            h = i // p.R
            lanes = p.keys[h].lanes
            decayed = []
            for n, channels in enumerate(self._groups(h)):
                at = slice(i * p.decays + n, i * p.decays + n + 1)
                seen = distance <= run[i][n]
                D = jnp.exp2(jnp.where(seen, G[i][n] - gates.G[at], -jnp.inf)) * gates.b[at]
                decayed.append((qk[h][n][:C] * D, qk[h][n][C:] * D))
                write(slot.kt, i, halves(p, kts[h][channels].astype(F32) * gates.into[at]), channels)
            Aqk, A = map(_sum, zip(*decayed, strict=True))
            write(slot.Aqk, i, halves(p, Aqk))
            self._write_blocks(slot, i, A)
            if p.changes_keys and i % p.R == 0:
                slot.q[h, :, :lanes], slot.k[h, :, :lanes] = both[h][:C], both[h][C:]
            if p.inside.width:
                slot.v[i, :, : p.values[i].lanes] = v[i]
            yield

    def _score(self, i: int, both: list[Array], kts: list[Array], qk: list[list[Array]]) -> None:
        """[q; k] k^T, a group of channels each, once for the value heads that share them."""
        if i % self.p.R == 0:
            rows, kt = both[i // self.p.R], both[i // self.p.R][C:].T
            kts.append(kt)
            qk.append([dot(rows[:, n], kt[n]) for n in self._groups(i // self.p.R)])

    def _write_blocks(self, slot: Slot, i: int, A: Array) -> None:
        """The blocks of A that the inverse is built from, each level's side by side."""
        lane16, lane32, p = iota((16, C), 1), iota((32, C), 1), self.p
        packed, low16 = A[:16], A[16:32]
        for j in range(1, 8):
            packed = jnp.where(block_of(lane16, 16) == j, A[16 * j : 16 * j + 16], packed)
        for j in range(1, 4):
            low16 = jnp.where(block_of(lane16, 32) == j, A[32 * j + 16 : 32 * j + 32], low16)
        slot.packed[i] = jnp.where(iota((16, C), 0) > within(lane16, 16), packed, 0.0)
        write(slot.low16, i, halves(p, jnp.where(within(lane16, 32) < 16, low16, 0.0)))
        write(slot.low32, i, halves(p, jnp.where(lane32 < 32, A[32:64], pltpu.roll(A[96:], C - 32, 1))))
        write(slot.low64, i, halves(p, A[64:]))

    def solve_16(self) -> Iterator[None]:
        """Forward substitution: column j of every block is final after j steps."""
        p, slot = self.p, self.slots[(self.u - 1) % self.p.U]
        row, lane = iota((16, C), 0), iota((16, C), 1)
        A = [slot.packed[i] for i in range(p.heads)]
        X = [(row == within(lane, 16)).astype(F32)] * p.heads
        for j in range(15):
            columns = [jnp.take_along_axis(a, block_of(lane, 16) * 16 + j, axis=1) for a in A]
            X = [a - c * jnp.broadcast_to(a[j : j + 1], a.shape) for a, c in zip(X, columns, strict=True)]
            yield
        for i in range(p.heads):
            slot.packed[i] = X[i]
        yield

    def solve_64(self) -> Iterator[None]:
        p, slot = self.p, self.slots[(self.u - 2) % self.p.U]
        heads, low, X = range(p.heads), [], []
        zero = jnp.zeros((), kept(p))
        lane16, lane32 = iota((16, C), 1), iota((32, C), 1)
        for i in heads:
            X.append(halves(p, slot.packed[i]))
            diagonal = lambda a: self._block_diagonal(a, 16)  # noqa: E731
            low.append(product(p, read(slot.low16, i), each(diagonal, X[i])))
            yield
        second = block_of(self.row, 32) == block_of(self.col, 32)
        second &= (within(self.row, 32) >= 16) & (within(self.col, 32) < 16)
        place = lambda a: jnp.where(second, jnp.concatenate([a] * 8, 0), zero)  # noqa: E731
        for i in heads:
            low[i] = product(p, X[i], each(place, halves(p, low[i])))
            yield
        odd = within(lane16, 32) >= 16
        join = lambda a, b: jnp.concatenate([jnp.where(odd, zero, a), jnp.where(odd, a, -b)], 0)  # noqa: E731
        firsts = lambda a: jnp.concatenate(  # noqa: E731
            [jnp.where(lane32 < 32, a, zero), jnp.where((lane32 >= 64) & (lane32 < 96), a, zero)], 0
        )
        for i in heads:
            X[i] = each(join, X[i], halves(p, low[i]))
            low[i] = product(p, each(lambda a: a[:, :64], read(slot.low32, i)), each(firsts, X[i]))
            yield
        for i in heads:
            write(slot.M, i, X[i], slice(0, 32))
            write(slot.M, i, halves(p, low[i]), slice(32, 64))
            yield

    def solve_128(self) -> Iterator[None]:
        p, slot = self.p, self.slots[(self.u - 3) % self.p.U]
        heads, X, low = range(p.heads), [], []
        zero = jnp.zeros((), kept(p))
        lane32, lane64 = iota((32, C), 1), iota((64, C), 1)
        second = (block_of(self.row, 64) == block_of(self.col, 64)) & (within(self.row, 64) >= 32)
        second &= within(self.col, 64) < 32
        place = lambda a: jnp.where(second, jnp.concatenate([a] * 4, 0), zero)  # noqa: E731
        for i in heads:
            X.append(read(slot.M, i, slice(0, 32)))
            low.append(product(p, X[i], each(place, read(slot.M, i, slice(32, 64)))))
            yield
        odd = within(lane32, 64) >= 32
        join = lambda a, b: jnp.concatenate([jnp.where(odd, zero, a), jnp.where(odd, a, -b)], 0)  # noqa: E731
        for i in heads:
            X[i] = each(join, X[i], halves(p, low[i]))
            low[i] = product(p, each(lambda a: a[:, :64], read(slot.low64, i)), X[i])
            yield
        left = lane64 < 64
        below = lambda a: jnp.concatenate([jnp.zeros((64, C), kept(p)), jnp.where(left, a, zero)], 0)  # noqa: E731
        for i in heads:
            low[i] = product(p, X[i], each(below, halves(p, low[i])))
            yield
        for i in heads:
            write(slot.M, i, each(lambda a: jnp.where(left, a, zero), X[i]), slice(0, 64))
            whole = each(lambda a, b: jnp.where(left, -b, a), X[i], halves(p, low[i]))
            write(slot.M, i, whole, slice(64, C))
            yield

    def _state(self, i: int) -> Array:
        """The state that the chunk starts from, of a head, in whole tiles."""
        p, x, key, value = self.p, self.x, self.p.keys[i // self.p.R], self.p.values[i]
        S = x.states[self.u][i, : key.lanes, : value.lanes]
        if p.packed:
            given = placed(x.S_first[self.u][0, i], key, value) if p.starts else 0.0
            S = jnp.where(self.advanced.first, given, S)
        return S

    def advance(self) -> Iterator[None]:
        p, x, slot = self.p, self.x, self.slots[self.u]
        heads, S, from_state, before, u = range(p.heads), [], [], [], []
        for i in heads:
            S.append(self._state(i))
            if "S" in p.keeps:
                key, value = p.keys[i // p.R], p.values[i]
                x.S_kept[0, self.u, i] = S[i][key.low : key.high, value.low : value.high]
            if i % p.R == p.R - 1:
                h, first = i // p.R, 0
                key = p.keys[h]
                keys = (
                    (slot.q[h, :, : key.lanes], slot.k[h, :, : key.lanes])
                    if p.changes_keys
                    else [self._head(name, key).astype(kept(p)) for name in ("q_late", "k_late")]
                )
                qk, states = jnp.concatenate(keys, 0), jnp.concatenate([a.astype(kept(p)) for a in S[h * p.R :]], 1)
                wide = [dot(qk[:, n], states[n]) for n in self._groups(h)]
                for value in p.values[h * p.R : i + 1]:
                    from_state.append([a[:, first : first + value.lanes] for a in wide])
                    first += value.lanes
            before.append([_widened(a, p.values[i].lanes) for a in self._spread(slot.before[...], i)])
            yield
        for i in heads:
            value = p.values[i]
            held = _sum([a[C:] * d for a, d in zip(from_state[i], before[i], strict=True)])
            v = slot.v[i, :, : value.lanes] if p.inside.width else self._head("v_late", value).astype(F32)
            rest = self._rows(self.advanced, v - held)
            u.append(product(p, read(slot.M, i), halves(p, rest)))
            self._keep("M", i, read(slot.M, i))
            self._keep("u", i, u[i])
            yield
        for i in heads:
            kt = read(slot.kt, i, slice(0, p.keys[i // p.R].lanes))
            both = each(lambda a, b: jnp.concatenate([a, b], 0), read(slot.Aqk, i), kt)
            u[i] = product(p, both, halves(p, u[i]))
            yield
        out: dict[int, Array] = {}
        for i in heads:
            value = p.values[i]
            read_out = _sum([a[:C] * d for a, d in zip(from_state[i], before[i], strict=True)])
            o = (read_out + u[i][:C]) * p.scale
            for n in range(value.tiles):
                tile, part = value.first + n, o[:, n * C : (n + 1) * C]
                out[tile] = out[tile] + part if tile in out else part
                if i == p.heads - 1 or p.values[i + 1].first > tile:  # nobody else has lanes in it
                    self._give(tile, out.pop(tile))
            kept_rows = [S[i][n] * d[C - 1 :] for n, d in zip(self._groups(i // p.R), before[i], strict=True)]
            S_next = (jnp.concatenate(kept_rows, 0) if len(kept_rows) > 1 else kept_rows[0]) + u[i][C:]
            x.states[self.u + 1][i, : p.keys[i // p.R].lanes, : value.lanes] = S_next
            yield

    def _keep(self, name: str, i: int, a: Array | Parts) -> None:
        """What the plan keeps of a head beside its state, as it enters products."""
        if name in self.p.keeps:
            for n, part in enumerate(a if isinstance(a, tuple) else halves(self.p, a)):
                getattr(self.x, f"{name}_kept")[0, self.u, i, n] = part

    def _give(self, tile: int, o: Array) -> None:
        """128 channels of the output; of packed sequences the chunk's rows alone, beside what others left there."""
        lanes = slice(tile * C, (tile + 1) * C)
        if not self.p.packed:
            ref, first = self.x.o, self.u * C
            ref[0, first : first + C, lanes] = o.astype(ref.dtype)
            return
        stage, last = self.x.stages[self.u], self.x.stages[self.u - 1]
        others = jnp.where(self.advanced.fresh, 0.0, last[:, lanes].astype(F32))
        stage[:, lanes] = jnp.where(self._own(self.advanced, iota(o.shape, 0)), o, others).astype(stage.dtype)
