"""The reading half of a port: yield the data to write, slab by slab, and read the sources ahead.

A source's tensor that is at most as large as a slab is read once as a whole, hashed in memory, and released when no
slab in the near future needs it. From a larger tensor, only the bytes that a slab needs are read if they are contiguous
(an expert of a stack). If they are not (columns of a matrix), the tensor is read as a whole, or through mapped memory
if it is too large for that (a stack of matrices).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple

import numpy as np

from ..spec.errors import GdnError
from .direct import Buffers, read
from .output import Move, Output
from .reader import Checkpoint

__all__ = ["Slab", "stream"]

_AHEAD = 4  # the sources in memory, in multiples of a slab's size
_WHOLE = 2**30  # bytes; a larger tensor is never read as a whole, unless it fits into a slab
_STEPS = 256  # the most slabs that are looked at ahead
_READERS = 2  # one reads while the other hashes


class Slab(NamedTuple):
    """A part of an output; its bytes are valid until the slab after the next is requested."""

    output: Output
    data: memoryview


class _Span(NamedTuple):
    """A range of bytes of a source's tensor."""

    name: str
    begin: int
    end: int


@dataclass
class _Loading:
    """A span that is in memory or being read; ``users`` counts the slabs that still need it."""

    future: Future[tuple[np.ndarray, mmap]]
    users: int = 0


class _Step(NamedTuple):
    output: Output
    slab: tuple[int, int]
    moves: list[Move] | None  # None if the elements are computed when they are needed
    spans: list[_Span | None]


def stream(
    outputs: Iterable[Output],
    source: Checkpoint,
    size: int,
    hashes: dict[str, str] | None = None,
    array: Callable[[str], np.ndarray] | None = None,
    overflow: dict[str, int] | None = None,
) -> Generator[Slab, None, None]:
    """Yield all slabs of all outputs in order.

    Args:
        outputs: The tensors to write.
        source: The checkpoint that holds their sources.
        size: The size of a slab in bytes.
        hashes: Filled with the SHA-256 of each source tensor that is read as a whole, by name; None hashes nothing.
        array: Returns tensors by name, if they are computed instead of taken from ``source``.
        overflow: Filled with the number of elements that a cast made infinite or NaN, by the output's name.

    Raises:
        GdnError: A file of the source became shorter.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        try:
            yield from _Stream(source, size, hashes, array, readers, overflow).slabs(outputs)
        finally:
            readers.shutdown(wait=True, cancel_futures=True)


class _Stream:
    def __init__(
        self,
        source: Checkpoint,
        size: int,
        hashes: dict[str, str] | None,
        array: Callable[[str], np.ndarray] | None,
        readers: ThreadPoolExecutor,
        overflow: dict[str, int] | None = None,
    ) -> None:
        self._overflow = overflow
        self._source, self._size, self._hashes, self._array = source, size, hashes, array
        self._readers = readers
        self._memory = Buffers(_AHEAD * size)
        self._loading: dict[_Span, _Loading] = {}
        self._bytes = 0

    def slabs(self, outputs: Iterable[Output]) -> Iterator[Slab]:
        two = [np.empty(0, np.uint8), np.empty(0, np.uint8)]  # one is filled while the other is written
        used: deque[_Step] = deque()
        for step in self._ahead(outputs):
            while len(used) > 1:
                self._done(used.popleft())
            buffer = None
            if step.output.verbatim is None:
                two.reverse()
                wanted = min(step.output.nbytes, 2 * self._size)
                if two[0].nbytes < wanted:
                    two[0] = np.empty(wanted, np.uint8)
                buffer = two[0]
            moves = list(self._moves(step))
            filled = step.output.fill(step.slab, moves, buffer)
            count = 0 if self._overflow is None else step.output.overflowed(filled, moves)
            if count:
                self._overflow[step.output.name] = self._overflow.get(step.output.name, 0) + count  # type: ignore[index,union-attr]
            yield Slab(step.output, memoryview(filled.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
            if step.moves is None or None in step.spans:
                self._source.release()
            used.append(step)

    def _ahead(self, outputs: Iterable[Output]) -> Iterator[_Step]:
        """Yield the steps in order; the sources of each were requested some time before."""
        waiting: deque[_Step] = deque()
        for output in outputs:
            for slab in output.slabs(self._size):
                moves, spans = None, []
                if output.verbatim is not None or self._array is None:
                    moves = output.moves(slab, self._source.array)
                    spans = [self._span(move) for move in moves]
                for span in dict.fromkeys(spans):
                    if span is not None:
                        self._ask(span)
                waiting.append(_Step(output, slab, moves, spans))
                while waiting and (self._bytes > _AHEAD * self._size or len(waiting) > _STEPS):
                    yield waiting.popleft()
        yield from waiting

    def _span(self, move: Move) -> _Span | None:
        """Return the bytes to read for a move, or None if they are not contiguous or not stored in this form."""
        if self._source.stored(move.name) != (move.name,):
            return None
        whole = self._source.where[move.name][1].nbytes
        if whole <= self._size:
            return _Span(move.name, 0, whole)
        x = move.elements
        reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + x.itemsize
        if reach <= 2 * x.nbytes:
            return _Span(move.name, move.at, move.at + reach)
        if whole <= _WHOLE:
            return _Span(move.name, 0, whole)
        self._source.prefetch(move.name)
        return None

    def _ask(self, span: _Span) -> None:
        if span not in self._loading:
            self._loading[span] = _Loading(self._readers.submit(self._load, span))
            self._bytes += span.end - span.begin
        self._loading[span].users += 1

    def _load(self, span: _Span) -> tuple[np.ndarray, mmap]:
        file, tensor = self._source.where[span.name]
        path = self._source.files[file]
        data, memory = read(path, tensor.begin + span.begin, tensor.begin + span.end, self._memory)
        if data.nbytes != span.end - span.begin:
            raise GdnError(f"{path} became shorter while it was read; it must not change.")
        if self._hashes is not None and tensor.nbytes <= self._size and span.name not in self._hashes:
            self._hashes[span.name] = hashlib.sha256(data).hexdigest()  # type: ignore[arg-type]
        return data, memory

    def _moves(self, step: _Step) -> Iterator[Move]:
        """Yield the moves of a step, with their elements in memory."""
        if step.moves is None:
            yield from step.output.moves(step.slab, self._array or self._source.array)
            return
        for move, span in zip(step.moves, step.spans, strict=True):
            if span is None or not move.elements.size:
                yield move
                continue
            data, _ = self._loading[span].future.result()
            x, at = move.elements, move.at - span.begin
            yield move._replace(elements=np.ndarray(x.shape, x.dtype, data, at, x.strides))

    def _done(self, step: _Step) -> None:
        for span in dict.fromkeys(step.spans):
            if span is None:
                continue
            loading = self._loading[span]
            loading.users -= 1
            if not loading.users:
                self._memory.give(loading.future.result()[1])
                del self._loading[span]
                self._bytes -= span.end - span.begin
