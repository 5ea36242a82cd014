"""Read and write files without the system's cache (O_DIRECT).

A port reads data that is larger than memory, and reads it once. With the cache, the system would have to find a page
for every block and give up another, which costs several times as much processor time as everything else in a port.
Files are therefore opened with O_DIRECT where the system and the file system support it, and normally elsewhere.
O_DIRECT requires that memory, lengths and positions in the file are multiples of a block; this module hides that from
its callers.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["Buffers", "Writer", "pieces", "read"]

_ALIGN = 4096
_BLOCK = 4 * 2**20
_FLAG = getattr(os, "O_DIRECT", 0)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _FLAG, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL or not _FLAG:
            raise
        return os.open(path, flags, 0o666)


def _plain(handle: int) -> bool:
    """Turn O_DIRECT off, for a file system that accepts the flag but needs larger blocks; return whether it was on."""
    import fcntl

    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_FLAG)
    return bool(flags & _FLAG)


def _read(handle: int, data: memoryview, at: int) -> int:
    """Read into ``data`` from this position of the file; return the number of bytes that one system call gave."""
    if not hasattr(os, "preadv"):
        os.lseek(handle, at, os.SEEK_SET)
        return os.readv(handle, [data])
    try:
        return os.preadv(handle, [data], at)
    except OSError as error:
        if error.errno != errno.EINVAL or not _FLAG or not _plain(handle):
            raise
        return os.preadv(handle, [data], at)


def _memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)  # begins at a page boundary


class Buffers:
    """Memory that is reused, because the system fills new pages with zeros, which costs as much as reading into them.

    Sizes are rounded up by at most an eighth, so that few different sizes occur. At most ``most`` bytes are kept
    unused.
    """

    def __init__(self, most: int) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._waiting = 0
        self._most = most
        self._lock = threading.Lock()

    def take(self, size: int) -> mmap.mmap:
        """Return memory of at least ``size`` bytes."""
        unit = max(2 * _ALIGN, 1 << max((size - 1).bit_length() - 3, 0))
        size += -size % unit
        with self._lock:
            if self._free.get(size):
                self._waiting -= size
                return self._free[size].pop()
        return _memory(size)

    def give(self, memory: mmap.mmap) -> None:
        """Take memory back; the caller must not use it afterwards."""
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)
            self._waiting += len(memory)
            while self._waiting > self._most:
                largest = max(size for size, some in self._free.items() if some)
                self._free[largest].pop()
                self._waiting -= largest


def read(path: Path, begin: int, end: int, buffers: Buffers) -> tuple[np.ndarray, mmap.mmap]:
    """Return bytes of a file and the memory that holds them; there are fewer than requested if the file is shorter."""
    low = begin - begin % _ALIGN
    wanted = end - low
    memory = buffers.take(wanted + _ALIGN)
    handle = _open(path, os.O_RDONLY)
    got = 0
    try:
        with memoryview(memory) as view:
            while got < wanted:
                more = _read(handle, view[got : wanted + -wanted % _ALIGN], low + got)
                if not more:
                    break
                got += more
    finally:
        os.close(handle)
    return np.frombuffer(memory, np.uint8)[begin - low : min(got, wanted)], memory


def pieces(path: Path, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a file in order. A piece is valid until the piece after the next is read."""
    room = min(_BLOCK, end - begin + -(end - begin) % _ALIGN + 2 * _ALIGN)
    two = [memoryview(_memory(room)) for _ in range(2)]
    handle = _open(path, os.O_RDONLY)
    try:
        at = begin
        while at < end:
            two.reverse()
            skip = at % _ALIGN
            got = _read(handle, two[0], at - skip)
            if got <= skip:
                return
            piece = two[0][skip : min(got, skip + end - at)]
            at += len(piece)
            yield piece
    finally:
        os.close(handle)


class Writer:
    """A new file of a known size. Its space is reserved at once, so that a full disk is noticed before any data is
    written.

    Raises:
        OSError: The file cannot be created; ENOSPC if the disk has too little space.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._memory = np.frombuffer(_memory(_BLOCK), np.uint8)
        self._filled = 0
        self._handle = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(self._handle, 0, size)
        except BaseException:
            os.close(self._handle)
            raise

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        new = np.frombuffer(data, np.uint8) if len(data) else self._memory[:0]
        while new.size:
            count = min(new.size, _BLOCK - self._filled)
            self._memory[self._filled : self._filled + count] = new[:count]
            self._filled += count
            new = new[count:]
            if self._filled == _BLOCK:
                self._flush()

    def _flush(self) -> None:
        """Write the buffered bytes, padded to whole blocks."""
        count = self._filled + -self._filled % _ALIGN
        self._memory[self._filled : count] = 0
        view = memoryview(self._memory)[:count]  # type: ignore[arg-type]
        while view:  # a system call may write less than it was given when the disk is nearly full
            try:
                wrote = os.write(self._handle, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not _FLAG or not _plain(self._handle):
                    raise
                continue
            view = view[wrote:]
        self._filled = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                if self._filled:
                    self._flush()
                os.ftruncate(self._handle, self._size)
        finally:
            os.close(self._handle)
