"""How many heads share a grid step of the pipelined kernel: from a table of schedules that were compiled.

For each chip, precision and pair of head dims, ``tiling.json`` holds the cycles of the kernel with at most a given
number of value heads per step; ``benchmarks/tpu_tiling.py`` compiles these figures again. A call uses what was best at
the nearest entry, and fewer heads if its number of heads is not divisible by it or VMEM is too small. This module does
not import jax.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import log2
from pathlib import Path
from typing import NamedTuple

__all__ = ["FILE", "Entry", "best", "entries", "trying"]

FILE = Path(__file__).with_suffix(".json")


#: Chips with the matrix unit of another one that the table has.
LIKE = {"v4": "v5e", "v5p": "v5e"}


class Entry(NamedTuple):
    """A schedule that was compiled: ``cycles`` for each value head and 128 tokens, with the prologue inside or not."""

    chip: str
    precision: str
    inside: bool
    key_dim: int
    value_dim: int
    heads: int
    cycles: int

    def __str__(self) -> str:
        inside = "with" if self.inside else "without"
        return (
            f"{self.cycles} cycles a value head and 128 tokens on {self.chip}, {self.precision}, "
            f"{self.key_dim} x {self.value_dim}, {inside} the prologue"
        )


@cache
def entries() -> tuple[Entry, ...]:
    """The table."""
    return tuple(Entry(**row) for row in json.loads(FILE.read_text())["schedules"])


_tried: list[int] = []


@contextmanager
def trying(heads: int) -> Iterator[None]:
    """Within it, ``heads`` value heads a step at most, whatever the table says. To make the table."""
    _tried.append(heads)
    try:
        yield
    finally:
        _tried.pop()


#: What more heads must gain: their program is longer, and so is its compilation.
WORTH = 0.98


@cache
def _nearest(chip: str, precision: str, inside: bool, key_dim: int, value_dim: int) -> Entry:
    def distance(e: Entry) -> tuple[float, ...]:
        dims = abs(log2(e.key_dim / key_dim)) + abs(log2(e.value_dim / value_dim))
        return e.chip != chip, dims, e.precision != precision, e.inside != inside

    least = min(map(distance, entries()))
    near = [e for e in entries() if distance(e) == least]
    least_cycles = min(e.cycles for e in near)
    return min((e for e in near if e.cycles * WORTH <= least_cycles), key=lambda e: e.heads)


def best(chip: str, precision: str, inside: bool, key_dim: int, value_dim: int) -> Entry:
    """The schedule with the fewest cycles of the chip (or any) for the nearest dims, precision and prologue."""
    found = _nearest(LIKE.get(chip, chip), precision, inside, key_dim, value_dim)
    return found._replace(heads=_tried[-1], cycles=0) if _tried else found
