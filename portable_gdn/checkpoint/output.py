"""Tensors to write: the pieces of the source that each is made of, its division into slabs, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .copying import copy
from .dtypes import dtype_of, itemsize
from .table import Made, Place, Spec

__all__ = ["Move", "Output", "Part", "Shard", "shards"]


@dataclass(frozen=True)
class Part:
    """One piece of an output: where it comes from, and the segment and indices of the output where it goes."""

    place: Place
    segment: int
    index: Mapping[str, int]


class Move(NamedTuple):
    """Elements of a source's tensor, with axes in the output's order, and their destination.

    Attributes:
        at: The number of bytes in the source's tensor before the first of these elements.
        segment, along: The segment of the output's layout, and the indices within it.
    """

    name: str
    elements: np.ndarray
    at: int
    segment: int = 0
    along: Mapping[str, int] = {}


@dataclass(frozen=True)
class Output:
    """A tensor to write.

    If ``made`` is None, it is a copy of the source's tensor that ``copied`` names. Without parts it is all zeros,
    unless ``computed`` returns the elements; ``made_of`` names the tensors that are then used.
    """

    name: str
    spec: Spec
    made: Made | None = None
    parts: tuple[Part, ...] = ()
    copied: str | None = None
    cast: bool = False
    computed: Callable[[], np.ndarray] | None = field(default=None, compare=False)
    made_of: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes of its data."""
        return prod(self.spec.shape) * itemsize(self.spec.dtype)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the source's tensors that it is made of."""
        if self.copied is not None:
            return (self.copied,)
        if self.made_of:
            return self.made_of
        return tuple(dict.fromkeys(part.place.bound.name for part in self.parts))

    @property
    def verbatim(self) -> str | None:
        """The source's tensor that has the same bytes, if this can be known without reading it; else None."""
        if self.copied is not None:
            return self.copied
        if len(self.parts) == 1 and self.made is not None and not self.cast:
            (part,) = self.parts
            lay = part.place.bound.entry.layout
            own = self.made.entry.layout
            if len(lay.segments) == len(own.segments) == 1 and lay.dims(0) == own.dims(0):
                return None if lay.indices or own.indices else part.place.bound.name
        return None

    def slabs(self, most: int) -> list[tuple[int, int]]:
        """Return ranges of at most ``most`` bytes each, or the single range (0, -1) if the tensor cannot be cut.

        The ranges count positions along the leading dim, or bytes if the output has the same bytes as a source's
        tensor.
        """
        if self.nbytes <= most:
            return [(0, -1)]
        if self.verbatim is not None:
            total, step = self.nbytes, most
        else:
            lead = self.leading
            if lead is None:
                return [(0, -1)]
            total = self._sizes()[lead]
            step = max(1, most * total // self.nbytes)
        return [(n, min(n + step, total)) for n in range(0, total, step)]

    @property
    def leading(self) -> str | None:
        """The dim or index along which it can be written in slabs, or None."""
        return self.made.entry.layout.leading if self.made is not None and self.parts else None

    def _sizes(self) -> Mapping[str, int]:
        assert self.made is not None
        return self.made.sizes

    def moves(self, slab: tuple[int, int], source: Callable[[str], np.ndarray]) -> list[Move]:
        """Return the moves that fill a slab; ``source`` returns a tensor by its name, and no elements are read yet."""
        low, high = slab
        if self.verbatim is not None:
            flat = source(self.verbatim).reshape(-1).view(np.uint8)
            return [Move(self.verbatim, flat if high < 0 else flat[low:high], low)]
        if not self.parts:
            return []
        assert self.made is not None
        lay, lead = self.made.entry.layout, self.leading
        cut = high >= 0 and lead is not None
        found = []
        for part in self.parts:
            bound = part.place.bound
            index = dict(part.index)
            if cut and lead is not None and lead[0] == "@":
                if not low <= index[lead[1:]] < high:
                    continue
                index[lead[1:]] -= low
            whole = source(bound.name)
            view = bound.entry.layout.view(whole, bound.sizes, part.place.segment, part.place.along)
            axes = bound.entry.layout.dims(part.place.segment)
            if cut and lead is not None and lead[0] != "@":
                view = view[(slice(None),) * axes.index(lead) + (slice(low, high),)]
            wanted = lay.dims(part.segment)
            view = view.transpose([axes.index(dim) for dim in wanted])
            found.append(Move(bound.name, view, view.ctypes.data - whole.ctypes.data, part.segment, index))
        return found

    def fill(self, slab: tuple[int, int], moves: Iterable[Move], buffer: np.ndarray | None = None) -> np.ndarray:
        """Return the elements of one slab, contiguous, in ``buffer`` if it is large enough."""
        dtype = dtype_of(self.spec.dtype)
        if self.verbatim is not None:
            (move,) = moves
            return move.elements
        if self.computed is not None:
            return np.ascontiguousarray(self.computed())
        if not self.parts:
            return np.zeros(self.spec.shape, dtype)
        assert self.made is not None
        lay, sizes, lead = self.made.entry.layout, dict(self.made.sizes), self.leading
        low, high = slab
        if high >= 0 and lead is not None:
            sizes[lead] = high - low
        shape = lay.shape(sizes)
        size = prod(shape) * dtype.itemsize
        room = buffer is not None and buffer.nbytes >= size
        out = buffer[:size].view(dtype).reshape(shape) if room else np.empty(shape, dtype)  # type: ignore[index]
        with np.errstate(over="ignore", invalid="ignore"):  # ``overflowed`` counts these
            for move in moves:
                copy(lay.view(out, sizes, move.segment, move.along), move.elements)
        return out

    def overflowed(self, filled: np.ndarray, moves: Iterable[Move]) -> int:
        """Return how many elements of a slab the cast made infinite or NaN."""
        if not self.cast:
            return 0
        bad = filled.size - int(np.count_nonzero(np.isfinite(filled)))
        if not bad:
            return 0
        return bad - sum(move.elements.size - int(np.count_nonzero(np.isfinite(move.elements))) for move in moves)


@dataclass(frozen=True)
class Shard:
    """A file to write: its path in the folder, the bytes before and after the tensors, and the tensors in order."""

    name: str
    header: bytes
    outputs: tuple[Output, ...]
    trailer: bytes = b""

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole file."""
        return len(self.header) + sum(o.nbytes for o in self.outputs) + len(self.trailer)


def shards(outputs: Sequence[Output], stem: str, most: int) -> list[Shard]:
    """Distribute tensors over files of at most ``most`` bytes; a larger tensor gets a file of its own."""
    groups: list[list[Output]] = []
    size = 0
    for output in outputs:
        if not groups or size + output.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.nbytes
    return [
        Shard(f"{stem}-{n:05d}-of-{len(groups):05d}.safetensors", _header(group), tuple(group))
        for n, group in enumerate(groups, 1)
    ]


def _header(outputs: Sequence[Output]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "portable-gdn"}}
    at = 0
    for output in outputs:
        entries[output.name] = {
            "dtype": output.spec.dtype, "shape": list(output.spec.shape), "data_offsets": [at, at + output.nbytes],
        }  # fmt: skip
        at += output.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
