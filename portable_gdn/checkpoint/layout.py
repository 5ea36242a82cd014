"""How one tensor of a file is put together from pieces: the small language of the family tables.

A *piece* is what all formats of a model share under one name: the query projection ``q``, the decay's ``A_log``. A
format differs from another in how it lays pieces out in tensors, and a layout says that for one tensor, axis by axis:

    "q: Hk Dk, E"                                      one piece: an axis of Hk * Dk rows, an axis of E
    "q: E, Hk Dk"                                      the same piece, transposed
    "(q Hk Dk | k Hk Dk | v Hk R Dv), E"               three pieces one after the other along an axis
    "Hk (q Dk | k Dk | v R Dv | z R Dv), E"            four pieces, interleaved: for each key head its rows of each
    "A_log: 1, 1, Hk R, 1"                             axes of length 1
    "@e, (expert_gate M | expert_up M), E"             stacked: an axis along which the expert's number runs
    "q#A & k#A: rank, E"                               one tensor that is several pieces at once

Dims are named by words: those that begin with a capital have one size in the whole checkpoint, others their own in each
tensor; "@" begins the name of an index. Since a layout only splits, joins, permutes and stacks, it is undone by reading
it the other way: ``view`` gives a piece's elements inside a tensor as an array with named axes, for reading and for
writing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

__all__ = ["Layout", "layout"]


@dataclass(frozen=True)
class Layout:
    """A parsed layout.

    axes: for each axis of the tensor the dims it is the product of (without those inside the parentheses).
    joined: the axis that holds the parentheses, or None.
    segments: for each piece its name and the dims inside the parentheses.
    """

    text: str
    axes: tuple[tuple[str, ...], ...]
    joined: int | None
    segments: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of the pieces, in order."""
        return tuple(name for name, _ in self.segments)

    @property
    def shared(self) -> bool:
        """Whether one tensor is several pieces at once."""
        return self.joined is None and len(self.segments) > 1

    @property
    def indices(self) -> tuple[str, ...]:
        """Names of the indices that run along axes, without "@"."""
        return tuple(dim[1:] for axis in self.axes for dim in axis if dim[0] == "@")

    def dims(self, segment: int) -> tuple[str, ...]:
        """Named dims of one piece, in the order of this tensor."""
        found: list[str] = []
        for n, axis in enumerate(self.axes):
            found += [d for d in axis if d != "1" and d[0] != "@"]
            if n == self.joined:
                found += self.segments[segment][1]
        return tuple(found)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape, for sizes of all dims (indices under their names with "@")."""
        return tuple(
            prod(_size(d, sizes) for d in axis) * (self._width(sizes) if n == self.joined else 1)
            for n, axis in enumerate(self.axes)
        )

    def _width(self, sizes: Mapping[str, int]) -> int:
        return sum(prod(_size(d, sizes) for d in dims) for _, dims in self.segments)

    def view(self, array: np.ndarray, sizes: Mapping[str, int], segment: int, index: Mapping[str, int]) -> np.ndarray:
        """One piece's elements of the tensor, without a copy: axes are those of ``dims(segment)``."""
        full: list[int] = []
        picks: list[int | slice] = []
        tail: list[int] = []
        for n, axis in enumerate(self.axes):
            for d in axis:
                full.append(_size(d, sizes))
                picks.append(0 if d == "1" else index[d[1:]] if d[0] == "@" else slice(None))
            if n == self.joined:
                widths = [prod(_size(d, sizes) for d in dims) for _, dims in self.segments]
                start = sum(widths[:segment])
                full.append(sum(widths))
                picks.append(slice(start, start + widths[segment]))
        found = array.reshape(full)[tuple(picks)]
        if self.joined is not None:
            tail = [_size(d, sizes) for d in self.segments[segment][1]]
            at = sum(isinstance(p, slice) for p in picks[: self._place()])
            found = found.reshape(*found.shape[:at], *tail, *found.shape[at + 1 :])  # splitting an axis is a view
        return found

    def _place(self) -> int:
        """How many factors stand before the joined one."""
        assert self.joined is not None
        return sum(len(axis) for axis in self.axes[: self.joined + 1]) + 0

    @property
    def leading(self) -> str | None:
        """The outermost dim or index of the first axis, along which a tensor can be made in slabs; None if none can."""
        if not self.axes or not self.axes[0] or self.axes[0][0] == "1":
            return None
        return self.axes[0][0]

    def solve(self, shape: tuple[int, ...], known: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes of all dims that give this shape, or None if none do. An axis with two unknowns is left unsolved."""
        if len(shape) != len(self.axes):
            return None
        sizes = dict(known)
        for _ in range(2):  # what one axis tells may be needed by another
            for n, (axis, have) in enumerate(zip(self.axes, shape, strict=True)):
                terms = [axis] if n != self.joined else [(*axis, *dims) for _, dims in self.segments]
                unknown = {d for term in terms for d in term if d != "1" and d not in sizes}
                if not unknown:
                    if sum(prod(_size(d, sizes) for d in term) for term in terms) != have:
                        return None
                elif len(unknown) == 1:
                    (name,) = unknown
                    if any(term.count(name) > 1 for term in terms):
                        continue
                    per = sum(prod(_size(d, sizes) for d in term if d != name) for term in terms if name in term)
                    rest = sum(prod(_size(d, sizes) for d in term) for term in terms if name not in term)
                    if per == 0 or (have - rest) % per or have < rest:
                        return None
                    sizes[name] = (have - rest) // per
        return sizes

    def unsolved(self, sizes: Mapping[str, int]) -> list[str]:
        """Dims that have no size yet."""
        every = [d for axis in self.axes for d in axis] + [d for _, dims in self.segments for d in dims]
        return [d for d in dict.fromkeys(every) if d != "1" and d not in sizes]


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    return 1 if dim == "1" else sizes[dim]


_GROUP = re.compile(r"^(?P<outer>[^(]*)\((?P<inner>[^)]*)\)\s*$")


@cache
def layout(text: str) -> Layout:
    """Parse a layout; see the top of this file."""
    piece, colon, rest = text.partition(":")
    axes: list[tuple[str, ...]] = []
    joined: int | None = None
    segments: tuple[tuple[str, tuple[str, ...]], ...] = ()
    for n, part in enumerate((rest if colon else text).split(",")):
        found = _GROUP.match(part)
        if found:
            joined = n
            segments = tuple((w[0], tuple(w[1:])) for w in (s.split() for s in found["inner"].split("|")))
            part = found["outer"]
        axes.append(tuple(part.split()))
    if bool(colon) == (joined is not None):
        raise ValueError(f"layout {text!r} must name one piece before a colon, or several in parentheses")
    return Layout(text, tuple(axes), joined, segments or tuple((name.strip(), ()) for name in piece.split("&")))
