"""The phase ``advance`` with one decay per head, or one for each group of channels that are whole tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ..common.products import dot
from ..common.registers import F32
from ..common.summands import each
from ..common.tiles import CHUNK, LANES
from .geometry import Pipeline
from .memory import ChunkMemory
from .products import halves, operand_dtype, product
from .scores import channel_groups, spread_decays, sum_of
from .slots import Slot, read

__all__ = ["advance"]

Array = Any
C = CHUNK


def advance(p: Pipeline, chunk: ChunkMemory, slot: Slot) -> Iterator[None]:
    """What the state and the chunk's own tokens give, the output, and the next state. Stops after each value head."""
    heads, S, from_state, before, u = range(p.heads), [], [], [], []
    for i in heads:
        S.append(chunk.state(i))
        chunk.keep_state(i, S[i])
        if i % p.R == p.R - 1:
            from_state += _read_states(p, chunk, slot, i // p.R, S[i + 1 - p.R :])
        before.append([_widened(a, p.values[i].lanes) for a in spread_decays(p, slot.before[...], i)])
        yield
    for i in heads:
        value = p.values[i]
        held = sum_of([a[C:] * d for a, d in zip(from_state[i], before[i], strict=True)])
        v = slot.v[i, :, : value.lanes] if p.inside.width else chunk.v.late(value).astype(F32)
        rest = chunk.advanced_rows(v - held)
        u.append(product(p, read(slot.blocks.M, i), halves(p, rest)))
        chunk.keep(chunk.outputs.kept.M, i, read(slot.blocks.M, i))
        chunk.keep(chunk.outputs.kept.u, i, u[i])
        yield
    for i in heads:
        kt = read(slot.kt, i, slice(0, p.keys[i // p.R].lanes))
        both = each(lambda a, b: jnp.concatenate([a, b], 0), read(slot.Aqk, i), kt)
        u[i] = product(p, both, halves(p, u[i]))
        yield
    output = _Output(p, chunk)
    for i in heads:
        read_out = sum_of([a[:C] * d for a, d in zip(from_state[i], before[i], strict=True)])
        output.add(i, (read_out + u[i][:C]) * p.scale)
        kept_rows = [S[i][n] * d[C - 1 :] for n, d in zip(channel_groups(p, i // p.R), before[i], strict=True)]
        chunk.put_state(i, (jnp.concatenate(kept_rows, 0) if len(kept_rows) > 1 else kept_rows[0]) + u[i][C:])
        yield


def _read_states(p: Pipeline, chunk: ChunkMemory, slot: Slot, h: int, S: list[Array]) -> list[list[Array]]:
    """[q; k] S of the value heads of a key head: of each, for each of its groups of channels, [2 C, value lanes]."""
    key = p.keys[h]
    if p.changes_keys:
        q, k = slot.q[h, :, : key.lanes], slot.k[h, :, : key.lanes]
    else:
        q, k = (x.late(key).astype(operand_dtype(p)) for x in (chunk.q, chunk.k))
    rows, states = jnp.concatenate([q, k], 0), jnp.concatenate([a.astype(operand_dtype(p)) for a in S], 1)
    wide = [dot(rows[:, n], states[n]) for n in channel_groups(p, h)]
    found, first = [], 0
    for value in p.values[h * p.R : (h + 1) * p.R]:
        found.append([a[:, first : first + value.lanes] for a in wide])
        first += value.lanes
    return found


def _widened(a: Array, lanes: int) -> Array:
    """[rows, C] with every lane of a row alike, to more lanes."""
    return jnp.concatenate([a] * (lanes // C), 1) if lanes > C else a


class _Output:
    """The output by tiles of 128 channels, which heads may share: a tile is written with the last of them."""

    def __init__(self, p: Pipeline, chunk: ChunkMemory) -> None:
        self.p, self.chunk = p, chunk
        self.tiles: dict[int, Array] = {}

    def add(self, i: int, o: Array) -> None:
        """A value head's output in whole tiles [C, lanes]."""
        values = self.p.values
        if values[i].whole:
            self.chunk.put_head(i, o)
            return
        for n in range(values[i].tiles):
            number, part = values[i].first + n, o[:, n * LANES : (n + 1) * LANES]
            self.tiles[number] = self.tiles[number] + part if number in self.tiles else part
            if i == self.p.heads - 1 or values[i + 1].first > number:  # nobody else has lanes in it
                self.chunk.put_output(number, self.tiles.pop(number))
