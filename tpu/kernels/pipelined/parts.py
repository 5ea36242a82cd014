"""Which rows of its block a chunk of a grid step has, and what the table of chunks says of packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ... import table as tb
from ..common.registers import iota
from ..common.tiles import CHUNK
from .geometry import Pipeline

__all__ = ["Part", "StepEntry", "TableEntry", "late", "now", "own", "own_rows", "parts_of_rows", "read_table"]

Array = Any


class Part(NamedTuple):
    """A chunk in the block of C tokens that it lies in: the rows that are its own, and of packed sequences, whether it
    is a sequence's first chunk, and the first one in its block. Scalars."""

    begin: Any
    end: Any
    first: Any = None
    fresh: Any = None


class TableEntry(NamedTuple):
    """A chunk's words in the table of chunks (``table.chunk_table``). Scalars."""

    block: Array
    begin: Array
    end: Array
    slot: Array
    flags: Array


class StepEntry(NamedTuple):
    """What a grid step of packed sequences has: the table's entries of the chunks of a grid step, and the step's group
    of heads."""

    chunks: list[TableEntry]
    group: Array

    @property
    def parts(self) -> list[Part]:
        """Where the chunks lie in their blocks."""
        return [Part(c.begin, c.end, c.flags & tb.FIRST != 0, c.flags & tb.FRESH != 0) for c in self.chunks]


def now(p: Pipeline, entry: Array) -> Array:
    """What ``scores`` works on in a grid step: row, group and step of a sequence in one number, the last one twice."""
    return jnp.minimum(entry, p.entries - 1)


def late(entry: Array) -> Array:
    """What ``advance`` works on; in the first step it is the first, on scratch that holds nothing yet, and again in the
    second, when it holds what it should."""
    return jnp.maximum(entry - 1, 0)


def read_table(p: Pipeline, table: Any, part: Array, at: Array) -> StepEntry:
    """The chunks of a grid step ``at`` of one of the cores' parts."""
    group = part * (p.groups // p.parts) + lax.div(at, jnp.int32(p.steps))
    first = lax.rem(at, jnp.int32(p.steps)) * p.U
    words = [TableEntry(*(table[(first + u) * tb.WORDS + n] for n in range(tb.WORDS))) for u in range(p.U)]
    return StepEntry(words, group)


def parts_of_rows(p: Pipeline, step: Array) -> list[Part]:
    """The chunks of a grid step in a row: all tokens are theirs up to T."""
    return [Part(0, p.T - (step * p.U + u) * CHUNK) for u in range(p.U)]


def own(p: Pipeline, part: Part, index: Array) -> Array:
    """Which of the block's rows, given by index, are the chunk's."""
    return (index >= part.begin) & (index < part.end) if p.packed else index < part.end


def own_rows(p: Pipeline, part: Part, a: Array) -> Array:
    """a [C, lanes] with 0 in rows that are not the chunk's."""
    return jnp.where(own(p, part, iota(a.shape, 0)), a, jnp.zeros((), a.dtype)) if p.masked else a
