"""Layouts: the small language in which family tables say how a tensor is put together from pieces.

A *piece* is a part of a model that all formats share under one name, such as the query projection ``q`` or the decay's
``A_log``. Formats differ in how they lay pieces out in tensors. A layout describes one tensor, axis by axis:

    "q: Hk Dk, E"                                      one piece: an axis of Hk * Dk rows, an axis of E columns
    "q: E, Hk Dk"                                      the same piece, transposed
    "(q Hk Dk | k Hk Dk | v Hk R Dv), E"               three pieces, concatenated along an axis
    "Hk (q Dk | k Dk | v R Dv | z R Dv), E"            four pieces, interleaved: each key head's rows of all four
    "A_log: 1, 1, Hk R, 1"                             axes of length 1
    "@e, (expert_gate M | expert_up M), E"             stacked: the first axis is the expert's number
    "q#A & k#A: rank, E"                               one tensor that is several pieces at once

Names of dims that begin with a capital have the same size in the whole checkpoint; others have a size of their own in
each tensor. "@" marks an index. A layout only splits, joins, permutes and stacks, so it works in both directions:
``view`` returns the elements of a piece inside a tensor as an array with named axes, for reading and for writing.
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

    Attributes:
        text: The layout as it was written.
        axes: For each axis of the tensor, the dims whose product it is (without those inside the parentheses).
        joined: The axis that has the parentheses, or None.
        segments: For each piece, its name and the dims inside the parentheses.
        shared: Whether the tensor is several pieces at once.
    """

    text: str
    axes: tuple[tuple[str, ...], ...]
    joined: int | None
    segments: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def pieces(self) -> tuple[str, ...]:
        """The names of the pieces, in order."""
        return tuple(name for name, _ in self.segments)

    @property
    def shared(self) -> bool:
        """Whether one tensor is several pieces at once."""
        return self.joined is None and len(self.segments) > 1

    @property
    def indices(self) -> tuple[str, ...]:
        """The names of the indices that are axes, without "@"."""
        return tuple(dim[1:] for axis in self.axes for dim in axis if dim[0] == "@")

    def dims(self, segment: int) -> tuple[str, ...]:
        """Return the named dims of one piece, in the order in which this tensor has them."""
        found: list[str] = []
        for n, axis in enumerate(self.axes):
            found += [d for d in axis if d != "1" and d[0] != "@"]
            if n == self.joined:
                found += self.segments[segment][1]
        return tuple(found)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tensor's shape, given the sizes of all dims (those of indices under their names with "@")."""
        return tuple(
            prod(_size(d, sizes) for d in axis) * (self._width(sizes) if n == self.joined else 1)
            for n, axis in enumerate(self.axes)
        )

    def _width(self, sizes: Mapping[str, int]) -> int:
        return sum(prod(_size(d, sizes) for d in dims) for _, dims in self.segments)

    def view(self, array: np.ndarray, sizes: Mapping[str, int], segment: int, index: Mapping[str, int]) -> np.ndarray:
        """Return a view of one piece's elements; its axes are those of ``dims(segment)``."""
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
            found = found.reshape(*found.shape[:at], *tail, *found.shape[at + 1 :])  # splitting an axis does not copy
        return found

    def _place(self) -> int:
        """The number of factors before the one that has the parentheses."""
        assert self.joined is not None
        return sum(len(axis) for axis in self.axes[: self.joined + 1]) + 0

    @property
    def leading(self) -> str | None:
        """The outermost dim or index of the first axis, along which the tensor can be made in slabs, or None."""
        if not self.axes or not self.axes[0] or self.axes[0][0] == "1":
            return None
        return self.axes[0][0]

    def solve(self, shape: tuple[int, ...], known: Mapping[str, int]) -> dict[str, int] | None:
        """Return the sizes of all dims that give this shape, or None if none do.

        An axis with two unknown sizes is left unsolved.
        """
        if len(shape) != len(self.axes):
            return None
        sizes = dict(known)
        for _ in range(2):  # a size found on one axis may be needed for another
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
        """Return the dims whose sizes are not known."""
        every = [d for axis in self.axes for d in axis] + [d for _, dims in self.segments for d in dims]
        return [d for d in dict.fromkeys(every) if d != "1" and d not in sizes]


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    return 1 if dim == "1" else sizes[dim]


_GROUP = re.compile(r"^(?P<outer>[^(]*)\((?P<inner>[^)]*)\)\s*$")


@cache
def layout(text: str) -> Layout:
    """Parse a layout; the top of this file describes the language.

    Raises:
        ValueError: The text has neither one piece before a colon nor several in parentheses.
    """
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
