"""The phase ``scores`` with decays by channel: KDA, GDN-2, GLA; heads of 128 channels.

Decays do not leave the contraction, so that each of the seven levels of the hierarchy (``common.decay_factors``) is a
product of its own; at levels of eight rows and more only the right blocks' rows take part. What reads the state (q and
e decayed from the chunk's start) and what is written to it (k decayed to the chunk's end) is made here too, while the
factors are at hand, and kept for ``advance``. One beta a head scales columns only; erase gates by channel scale keys
before the products, write gates values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..common.decay_factors import doubled, joined, split
from ..common.interleaving import Deferred
from ..common.products import dot
from ..common.registers import BF16, F32, iota
from ..common.summands import PIECES, Parts, exact_pieces
from ..common.tiles import CHUNK, SUBLANES
from . import prologue
from .geometry import Pipeline
from .inverse import write_blocks
from .memory import ChunkMemory, place_of_chunk
from .parts import own
from .products import halves
from .scores import key_rows
from .slots import ChannelSlot, write

__all__ = ["scores"]

Array = Any
C = CHUNK

#: Levels behind which a head's scores let the other phases go on.
_PAUSES = (2, 8, 32)


class _Found(NamedTuple):
    """What a value head leaves to ``advance``: summands of Aqk and k^T [C, C], reads [2 C or C, C] bfloat16, written
    [C, C] float32 or None; as in ``slots.ChannelSlot``."""

    Aqk: Parts
    kt: Parts
    reads: Array
    written: Array | None


def scores(p: Pipeline, chunk: ChunkMemory, slot: ChannelSlot, square: tuple[Array, Array]) -> Iterator[None]:
    """A in the blocks of the inverse, and what ``advance`` takes, into the chunk's slot; square: row and column numbers
    [C, C]."""
    beta, totals = _beta(p, chunk), []
    # ``advance`` reads what the chunk before left of a head until so many rounds have passed.
    later = Deferred()
    for i in range(p.heads):
        if i % p.R == 0:
            keys = key_rows(p, chunk, i // p.R)
        head = _Head(p, chunk, i, None if beta is None else beta[i : i + 1], square)
        for found in head.run(slot, keys, totals):
            if found is not None:
                later.until(2 * p.heads + i, partial(_fill, slot, i, found))
            yield
            later.next_round()
    while later:
        yield
        later.next_round()
    rows = [total[n].astype(F32) for n in range(PIECES) for total in totals]
    slot.total[...] = jnp.concatenate(rows, 0).T.astype(BF16)


def _beta(p: Pipeline, chunk: ChunkMemory) -> Array | None:
    """The gate where there is one per head: [heads, C], tokens in lanes."""
    if p.widths.erase != 1:
        return None
    assert chunk.inputs.b is not None
    ref, first = place_of_chunk(p, chunk.inputs.b, chunk.u)
    b = ref[0, 0, :, first : first + C]
    return jnp.where(own(p, chunk.scored, iota(b.shape, 1)), b, 0.0) if p.masked else b


def _fill(slot: ChannelSlot, i: int, found: _Found) -> None:
    write(slot.Aqk, i, found.Aqk)
    write(slot.kt, i, found.kt)
    slot.reads[i] = found.reads
    if found.written is not None:
        slot.v[i] = found.written


class _Head:
    """The scores of one value head; beta: its gate [1, C], or None."""

    def __init__(
        self, p: Pipeline, chunk: ChunkMemory, i: int, beta: Array | None, square: tuple[Array, Array]
    ) -> None:
        self.p, self.chunk, self.i, self.beta = p, chunk, i, beta
        self.row, self.column = square

    def run(self, slot: ChannelSlot, keys: Array, totals: list[Parts]) -> Iterator[_Found | None]:
        """Its rounds; the last one hands over what ``advance`` will read. keys: q above k
        [2 C, 128]."""
        p, q, k = self.p, keys[:C], keys[C:]
        same, key, g = dot(q, k, "nt"), k.astype(F32), self._log_decay()
        totals.append(exact_pieces(jnp.exp(jnp.sum(g, 0, keepdims=True))))
        P, Q = jnp.exp(g), jnp.ones((C, C), F32)
        rows = [q.astype(F32)]
        if p.widths.erase:
            rows.append(self._gate(self.chunk.inputs.b) * key if self.beta is None else key)
        written = self._written() if p.keeps_values else None
        out = [jnp.where(self.row == self.column, same, 0.0), jnp.zeros((C, C), F32)][: len(rows)]
        size, corners = 1, None
        while size < C:
            found = _level(rows, key, P, Q, size)
            if corners is not None:
                out = [self._beside(a, x, size // 2) for a, x in zip(out, corners, strict=True)]
            corners = found
            P, Q = doubled(P, Q, size)
            if size in _PAUSES:
                yield None
            size *= 2
        out = [self._beside(a, x, size // 2) for a, x in zip(out, corners, strict=True)]
        decayed = key * Q
        # Keys are rounded once, before beta, which is as exact as what it scales.
        kt = decayed.astype(BF16).T.astype(F32)
        kt = halves(p, kt if self.beta is None else kt * self.beta)
        out = out if self.beta is None else [a * self.beta for a in out]
        if slot.blocks is not None:
            write_blocks(p, slot.blocks, self.i, out[1])
        yield _Found(halves(p, out[0]), kt, jnp.concatenate([(x * P).astype(BF16) for x in rows], 0), written)

    def _gate(self, refs: Any) -> Array:
        """A gate of the head's channels [C, C] float32, 0 in rows that are not the chunk's."""
        return self.chunk.scored_rows(self.chunk.channels(refs, self.i))

    def _log_decay(self) -> Array:
        """The head's log decays [C, C] float32, 0 in rows that are not the chunk's."""
        g = self.chunk.channels(self.chunk.inputs.g, self.i)
        if self.p.inside.gate:
            gate, i = self.chunk.inputs.gate, self.i
            assert gate is not None
            rate, bias = (gate[n : n + 1, i * C : (i + 1) * C] for n in range(2))
            g = prologue.channel_decay(self.p.inside, g, rate, bias)
        return self.chunk.scored_rows(g)

    def _written(self) -> Array:
        """The values that are written [C, C] float32, with their gates."""
        v = self.chunk.v.prepared(self.p.values[self.i]).astype(F32)
        w = self.chunk.inputs.w
        return v if w is None else v * self.chunk.channels(w, self.i)

    def _beside(self, finer: Array, corners: Array, size: int) -> Array:
        """A level's corners beside the finer levels [C, C], which are the lanes of a row's own block of ``size``
        rows."""
        keep = self.column >= (self.row & -size)
        if size < SUBLANES:
            return jnp.where(keep, finer, corners)
        left, right = split(finer, size)
        return joined(left, jnp.where(split(keep, size)[1], right, jnp.reshape(corners, right.shape)))


def _level(rows: list[Array], k: Array, P: Array, Q: Array, size: int) -> list[Array]:
    """Products of all corners of a level, [C, C] or of the right blocks' rows [C / 2, C]; keys in their lanes."""
    if size < SUBLANES:
        left = jnp.concatenate([(x * P).astype(BF16) for x in rows], 0)
        keys = (k if size == 1 else k * Q).astype(BF16)
    else:
        right = lambda x: jnp.reshape(split(x, size)[1], (C // 2, C))  # noqa: E731
        left = jnp.concatenate([(right(x) * right(P)).astype(BF16) for x in rows], 0)
        kept = split(k, size)[0] * split(Q, size)[0]
        keys = joined(kept, jnp.zeros_like(kept)).astype(BF16)
    found = dot(left, keys, "nt")
    height = found.shape[0] // len(rows)
    return [found[n * height : (n + 1) * height] for n in range(len(rows))]
