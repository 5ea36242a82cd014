"""A row's tokens as one chunk: what the window kernel does with drafts where their bits may depend on how they came.

States S before the row's tokens are read once, for all of its P tokens, and written once, after the first c of them::

    X = w v - b D k S;    U = X - A U, from the first row on;    O = D q S + M U;    S <- D_c S + (C k)^T U

with D the decay from the row's start to each token, A and M the products b k k^T and q k^T with the decays between
their tokens, C the decays from each token to the last one committed. Products with S are sums of bfloat16 pieces that
leave out nothing of a float32 number but what its sums round: the state is loaded into the product unit as three
pieces, the tokens run past it as three, and six of the nine products count. So no state is read rounded.

With the convolution inside, keys and values come as its inputs, eight rows of history before those of the tokens, and
are convolved, normalised and scaled here; nothing but inputs in their own dtype is read.

A token never sees a later one: rows are selected, not multiplied by zeros, so that nothing of a draft, were it no
number, reaches what comes before it. All decays are products of factors, so that a reset is a zero among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..common.products import dot
from ..common.registers import BF16, F32, iota
from ..common.summands import PIECES, exact_pieces
from ..common.tiles import SUBLANES
from ..pipelined.prologue import HISTORY, normalised
from .plan import TAPS, Window

__all__ = ["Chunk", "ChunkOperands"]

Array = Any
Ref = Any
#: The state [K, V] of a value head before the row; and what takes the one after it, float32.
Load = Callable[[int], Array]
Store = Callable[[int, Array], None]

#: Units whose stages alternate: while the products of some are under way, the vector unit has others to work on.
_TOGETHER = 4
#: Value heads of one key head that share a pass through the product unit: two of 128 channels fill a side of 256.
_ABREAST = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkOperands:
    """Operands by blocks of h key heads and r h value heads, [N, blocks, ...], float32 unless said.

    Attributes:
        keys: [.., h, 2 P, K], the rows k, then scale q. values: [.., r h, P, V], w v.
            With the convolution inside [.., h, 2 L, K] and [.., r h, L, V] of its inputs in any dtype, with L = 8 + P:
            the last of the first eight rows are those before the first token.
        gates: [.., P, m], by value head: the decay factors d unless they are by channel, then b unless that is, or None
            where neither is left.
        channels: [.., r h, m P, K], the rows d, then those of b k if the erase gate is by channel; or None.
        key_taps, value_taps: [1, blocks, h, 16, K] and [1, blocks, r h, 8, V], of k, then q, and of v: the taps, oldest
            first, then the bias, zeros behind; None where the convolution is not inside.
    """

    keys: Any
    values: Any
    gates: Any = None
    channels: Any = None
    key_taps: Any = None
    value_taps: Any = None


class _Unit(NamedTuple):
    """Value heads of a key head whose states lie side by side in the product unit."""

    key: int
    heads: tuple[int, ...]


class _Reading(NamedTuple):
    """What reads a unit's states, and how its tokens meet.

    left: the rows [2 P, K] that read the states. erased, put: for each token t the factors [P, 1] by which later tokens
    erase what it wrote, and put it out; without the decays that are one per head.
    """

    left: Array
    erased: list[Array]
    put: list[Array]


class _Decays(NamedTuple):
    """Decays of a row's tokens, of a block's value heads in lanes [P, r h], or of one by channel [P, K].

    since: from the row's start to each token. between: entry t has those from token t to each later one.
    """

    since: Array
    between: tuple[Array, ...]


class Chunk:
    """A row's tokens, of the value heads of a block.

    Args:
        x: references to the operands of the row and block. load: the states before the row.
        room: references for k and scale q [h, 2 P, K] and for w v [r h, P, V], where the convolution is inside.
    """

    def __init__(self, p: Window, x: ChunkOperands, load: Load, room: tuple[Ref, Ref] | None) -> None:
        self.p, self.x, self.load, self.room = p, x, load, room
        abreast, heads = 1 if p.by_channel else _ABREAST, range(p.value_heads)
        self.units = [
            _Unit(key, tuple(heads[n : min(n + abreast, (key + 1) * p.group)]))
            for key in range(p.key_heads)
            for n in range(key * p.group, (key + 1) * p.group, abreast)
        ]

    def run(self, count: Array, store: Store, o: Ref, kept: Ref | None) -> None:
        """The outputs of all tokens, and the states after the first ``count`` of them.

        Args:
            o: [1, 1, r h, P, V]. kept: where U [r h, P, V] is kept for ``commit``, or None.
        """
        decays = None if self.p.by_channel else _decays(self._factors())
        until = None if self.p.by_channel else _until(self._factors(), count)
        for first in range(0, len(self.units), _TOGETHER):
            some = self.units[first : first + _TOGETHER]
            if self.room is not None:
                for unit in some:
                    self._convolve(unit)
            states = [jnp.concatenate([self.load(h) for h in unit.heads], 1) for unit in some]
            reading = [self._by_channel(unit) if self.p.by_channel else self._by_head(unit) for unit in some]
            read = [_times(r.left, S) for r, S in zip(reading, states, strict=True)]
            written = []
            for unit, r, product in zip(some, reading, read, strict=True):
                written.append([])
                for number, h in enumerate(unit.heads):
                    u, o[0, 0, h] = self._solved(h, r, decays, self._part(product, number))
                    written[-1].append(u)
                    if kept is not None:
                        kept[h] = u
            for unit, us in zip(some, written, strict=True):
                self._commit(unit, count, us, until, store)

    def commit(self, count: Array, store: Store, kept: Ref) -> None:
        """The states after another ``count`` of tokens, from what ``run`` kept."""
        until = None if self.p.by_channel else _until(self._factors(), count)
        for unit in self.units:
            self._commit(unit, count, [kept[h] for h in unit.heads], until, store)

    # Operands.

    def _keys(self, key: int) -> Array:
        """k, then scale q, of a key head [2 P, K]."""
        return self.x.keys[0, 0, key] if self.room is None else self.room[0][key]

    def _convolve(self, unit: _Unit) -> None:
        """The convolution, norm and scale of a unit's tokens, and its write gate."""
        assert self.room is not None
        p, x = self.p, self.x
        assert p.before is not None
        keys, values = self.room
        if unit.heads[0] == unit.key * p.group:  # the first unit of its key head
            inputs, taps = x.keys[0, 0, unit.key].astype(F32), x.key_taps[0, 0, unit.key]
            length = HISTORY + p.places
            k = self._convolved(inputs[:length], taps[:TAPS])
            q = self._convolved(inputs[length:], taps[TAPS:])
            if p.before.l2norm:
                k, q = normalised(k), normalised(q)
            keys[unit.key, : p.places], keys[unit.key, p.places :] = k, p.before.scale * q
        for h in unit.heads:
            v = self._convolved(x.values[0, 0, h].astype(F32), x.value_taps[0, 0, h])
            beta = self._beta(h)
            values[h] = v if beta is None else beta * v

    def _convolved(self, inputs: Array, taps: Array) -> Array:
        """Tokens [P, n] through the convolution, from inputs [8 + P, n]."""
        p = self.p
        assert p.before is not None
        width = p.before.width
        terms = [inputs[HISTORY - width + 1 + j :][: p.places] * taps[j : j + 1] for j in range(width)]
        y = sum(terms[1:], terms[0]) + taps[width : width + 1]
        if not p.before.silu:
            return y
        half = 0.5 * y
        return half + half * jnp.tanh(half)

    def _factors(self, h: int | None = None) -> Array:
        """The decay factors, of all value heads [P, r h] or by channel of one [P, K]."""
        if h is None:
            return self.x.gates[0, 0][:, : self.p.value_heads]
        return self.x.channels[0, 0, h, : self.p.places]

    def _beta(self, h: int) -> Array | None:
        """The erase gate [P, 1] of a value head, where it is one value per head."""
        if not self.p.erases or self.p.erases_channels:
            return None
        lane = h if self.p.by_channel else self.p.value_heads + h
        return self.x.gates[0, 0][:, lane : lane + 1]

    def _part(self, a: Array, number: int) -> Array:
        """A value head's columns of what lies side by side."""
        return a[:, number * self.p.value_dim : (number + 1) * self.p.value_dim]

    # Stages.

    def _by_head(self, unit: _Unit) -> _Reading:
        rows = self._keys(unit.key)
        k, q = rows[: self.p.places], rows[self.p.places :]
        each = [jnp.broadcast_to(k[t : t + 1], k.shape) for t in range(self.p.places)]
        return _Reading(rows, [_lane_sum(k * one) for one in each], [_lane_sum(q * one) for one in each])

    def _by_channel(self, unit: _Unit) -> _Reading:
        (h,), places = unit.heads, self.p.places
        rows = self._keys(unit.key)
        k, q = rows[:places], rows[places:]
        decays = _decays(self._factors(h))
        erasing = self.x.channels[0, 0, h, places:] if self.p.erases_channels else k
        erased, put = [], []
        for t in range(places):
            one = jnp.broadcast_to(k[t : t + 1], k.shape) * decays.between[t]
            erased.append(_lane_sum(erasing * one))
            put.append(_lane_sum(q * one))
        return _Reading(jnp.concatenate([erasing * decays.since, q * decays.since], 0), erased, put)

    def _solved(self, h: int, r: _Reading, decays: _Decays | None, read: Array) -> tuple[Array, Array]:
        """U and O [P, V] of a value head, from its rows' product with its state."""
        p = self.p
        row = iota((p.places, p.value_dim), 0)
        wide = lambda a: jnp.broadcast_to(a, row.shape)  # noqa: E731
        erased, o = read[: p.places], read[p.places :]
        if decays is not None:
            since = wide(decays.since[:, h : h + 1])
            erased, o = since * erased, since * o
        u, beta = self.x.values[0, 0, h] if self.room is None else self.room[1][h], self._beta(h)
        beta = None if beta is None else wide(beta)
        if p.erases:
            u = u - (erased if beta is None else beta * erased)
        for t in range(p.places):
            one = wide(u[t : t + 1])
            decay = 1.0 if decays is None else wide(decays.between[t][:, h : h + 1])
            if p.erases and t + 1 < p.places:
                factor = r.erased[t] * decay
                u = jnp.where(row > t, u - (factor if beta is None else factor * beta) * one, u)
            o = jnp.where(row >= t, o + r.put[t] * decay * one, o)
        return u, o

    def _commit(
        self, unit: _Unit, count: Array, written: list[Array], until: tuple[Array, Array] | None, store: Store
    ) -> None:
        """The states of a unit's value heads after ``count`` tokens, from the U [P, V] of each."""
        p = self.p
        k = self._keys(unit.key)[: p.places]
        if until is None:
            (h,) = unit.heads
            each, whole = _until(self._factors(h), count)
            k = k * each
        else:
            each, whole = until
            written = [u * each[:, h : h + 1] for h, u in zip(unit.heads, written, strict=True)]
        # What is not committed may be no number, so it is taken out, and not multiplied by zeros.
        committed = lambda a: jnp.where(iota(a.shape, 0) < count, a, 0.0)  # noqa: E731
        left, right = (
            [part.astype(F32) for part in exact_pieces(committed(a))] for a in (k, jnp.concatenate(written, 1))
        )
        # Six products of the pieces, one behind the other in one sum: a single pass.
        pairs = [(i, j) for i in range(PIECES) for j in range(PIECES) if i + j < PIECES]
        depth = len(pairs) * p.places
        rows = [left[i] for i, _ in pairs]
        if until is None:
            rows.append(jnp.broadcast_to(whole, (SUBLANES, p.key_dim)))
        columns = jnp.transpose(jnp.concatenate(rows, 0))
        new = dot(columns[:, :depth].astype(BF16), jnp.concatenate([right[j] for _, j in pairs], 0).astype(BF16))
        for number, h in enumerate(unit.heads):
            decay = columns[:, depth : depth + 1] if until is None else whole[:, h : h + 1]
            store(h, self.load(h).astype(F32) * decay + self._part(new, number))


def _decays(d: Array) -> _Decays:
    """Products of decay factors d [P, n] between tokens."""
    row = iota(d.shape, 0)
    between = [jnp.ones(d.shape, F32)]
    for t in reversed(range(d.shape[0] - 1)):
        between.append(jnp.where(row <= t, 1.0, d[t + 1 : t + 2] * between[-1]))
    return _Decays(d[:1] * between[-1], tuple(reversed(between)))


def _until(d: Array, count: Array) -> tuple[Array, Array]:
    """Products of decay factors d [P, n] from each token to the last of the first ``count``; from the start, [1, n]."""
    row = iota(d.shape, 0)
    d = jnp.where(row < count, d, 1.0)
    found = jnp.ones(d.shape, F32)
    for t in range(1, d.shape[0]):
        found = jnp.where(row < t, found * d[t : t + 1], found)
    return found, d[:1] * found[:1]


def _lane_sum(a: Array) -> Array:
    return jnp.sum(a, axis=1, keepdims=True)


def _times(left: Array, S: Array) -> Array:
    """left [M, K] S [K, V], of float32 S by three pieces of each, of bfloat16 S by three pieces of ``left``."""
    rows = left.shape[0]
    high, middle, low = exact_pieces(left)
    if S.dtype != F32:
        found = dot(jnp.concatenate([high, middle, low], 0), S)
        return found[:rows] + (found[rows : 2 * rows] + found[2 * rows :])
    first, second, third = exact_pieces(S)
    # Two pieces of S side by side in the sum: 2 K = 256 is a whole side of the product unit of a v6e.
    both = [jnp.concatenate(pair, 1) for pair in ((high, high), (middle, middle), (low, jnp.zeros_like(low)))]
    found = dot(jnp.concatenate(both, 0), jnp.concatenate([first, second], 0))
    return found[:rows] + (found[rows : 2 * rows] + (found[2 * rows :] + dot(high, third)))
