"""The phase ``scores`` with one decay per head, or one for each group of channels that are whole tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..common.products import dot
from ..common.registers import F32
from ..common.tiles import CHUNK
from .gates import Gates, StepGates
from .geometry import Pipeline
from .inverse import write_blocks
from .memory import ChunkMemory
from .products import halves, operand_dtype, spread
from .slots import Slot, write

__all__ = ["channel_groups", "key_rows", "scores", "spread_decays", "sum_of"]

Array = Any
C = CHUNK


def channel_groups(p: Pipeline, h: int) -> list[slice]:
    """Channels of a key head's lanes that share a decay: all, or whole tiles."""
    width = p.keys[h].lanes // p.decays
    return [slice(n * width, (n + 1) * width) for n in range(p.decays)]


def spread_decays(p: Pipeline, columns: Array, i: int) -> list[Array]:
    """A value head's columns over the lanes, [C, C] for each of its decays."""
    return [spread(columns, p.heads * p.decays, i * p.decays + n) for n in range(p.decays)]


def sum_of(terms: Sequence[Array]) -> Array:
    """The sum of arrays, without the zero that ``sum`` begins with."""
    return sum(terms[1:], terms[0])


def key_rows(p: Pipeline, chunk: ChunkMemory, h: int) -> Array:
    """q above k of a key head [2 C, lanes]; rows of k, and of q where scores are kept, that are no tokens of the chunk
    are 0."""
    q, k = (x.prepared(p.keys[h]).astype(operand_dtype(p)) for x in (chunk.q, chunk.k))
    if "Aqk" in p.keeps:
        q = chunk.scored_rows(q)
    return jnp.concatenate([q, chunk.scored_rows(k)], 0)


class _Keys:
    """What a key head's value heads share.

    rows: as in ``key_rows``; kt: k^T [lanes, C]; qk: [q; k] k^T of each group of channels, [2 C, C] float32.
    """

    def __init__(self, p: Pipeline, chunk: ChunkMemory, h: int) -> None:
        self.p, self.h = p, h
        self.rows = key_rows(p, chunk, h)

    def multiply(self) -> None:
        """Form the products of the head's tokens; a while after the rows, where these take one to come about."""
        self.kt = self.rows[C:].T
        self.qk = [dot(self.rows[:, n], self.kt[n]) for n in channel_groups(self.p, self.h)]


def scores(
    p: Pipeline, chunk: ChunkMemory, slot: Slot, step_gates: StepGates, square: tuple[Array, Array]
) -> Iterator[None]:
    """Decays, Akk in the blocks of the inverse, Aqk, and k^T as the state takes it, into the chunk's slot.

    square: row and column numbers [C, C].

    Stops after each value head; ``advance`` of the chunk that the slot held before has read it after 3 heads' rounds.
    """
    heads, keys, v, G, run = range(p.heads), [], [], [], []
    gates = step_gates.of(chunk.u)
    for i in heads:
        if i % p.R == 0:
            keys.append(_Keys(p, chunk, i // p.R))
        v.append(chunk.v.prepared(p.values[i]) if p.inside.width else None)
        if not p.changes_keys and i % p.R == 0:
            keys[-1].multiply()
        yield
    for i in heads:
        if p.changes_keys and i % p.R == 0:  # a round later, since they took a while to come about
            keys[i // p.R].multiply()
        G.append(spread_decays(p, gates.sum, i))
        run.append(spread_decays(p, gates.run, i))
        yield
    for _ in heads:  # what follows writes what ``advance`` reads before
        yield
    slot.before[...] = gates.before
    row, column = square
    distance = jnp.where(row >= column, row - column, 2 * C).astype(F32)
    for i in heads:
        head = keys[i // p.R]
        _write_head(p, slot, i, head, gates, _Spread(distance, run[i], G[i]))
        if p.changes_keys and i % p.R == 0:
            lanes = p.keys[i // p.R].lanes
            slot.q[i // p.R, :, :lanes], slot.k[i // p.R, :, :lanes] = head.rows[:C], head.rows[C:]
        if p.inside.width:
            slot.v[i, :, : p.values[i].lanes] = v[i]
        yield


class _Spread(NamedTuple):
    """What says how a value head decays, [C, C] float32: distance, how many tokens a column lies before its row, or
    more than there are; run and G of each of its decays, spread over the lanes."""

    distance: Array
    run: list[Array]
    G: list[Array]


def _write_head(p: Pipeline, slot: Slot, i: int, head: _Keys, gates: Gates, spread: _Spread) -> None:
    """A value head's part of the slot."""
    decayed = []
    for n, channels in enumerate(channel_groups(p, head.h)):
        at = slice(i * p.decays + n, i * p.decays + n + 1)
        seen = spread.distance <= spread.run[n]
        D = jnp.exp2(jnp.where(seen, spread.G[n] - gates.G[at], -jnp.inf)) * gates.b[at]
        decayed.append((head.qk[n][:C] * D, head.qk[n][C:] * D))
        write(slot.kt, i, halves(p, head.kt[channels].astype(F32) * gates.into[at]), channels)
    Aqk, A = map(sum_of, zip(*decayed, strict=True))
    write(slot.Aqk, i, halves(p, Aqk))
    write_blocks(p, slot.blocks, i, A)
