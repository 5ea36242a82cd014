"""Files read and written past the system's cache.

What is ported is larger than memory and looked at once. Through the system's cache every byte costs a page that must be
found, and another that must be given up for it: several times the processor's work of everything else here. So files
are opened with O_DIRECT where system and file system have it, and otherwise as usual. Memory, lengths and places in the
file must then be whole blocks, which is all that this module hides.
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
    """Turn O_DIRECT off, for a file system that takes it and then wants larger blocks; whether it was on."""
    import fcntl

    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_FLAG)
    return bool(flags & _FLAG)


def _read(handle: int, data: memoryview, at: int) -> int:
    """Read into ``data`` from this place of the file; how many bytes one call gave."""
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
    return mmap.mmap(-1, size)  # begins at a page


class Buffers:
    """Memory that is used again: the system fills fresh pages with zeros, which costs as much as reading into them.

    Sizes are rounded up by at most an eighth, so that few occur; at most ``most`` bytes wait unused.
    """

    def __init__(self, most: int) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._waiting = 0
        self._most = most
        self._lock = threading.Lock()

    def take(self, size: int) -> mmap.mmap:
        """Memory of at least ``size`` bytes."""
        unit = max(2 * _ALIGN, 1 << max((size - 1).bit_length() - 3, 0))
        size += -size % unit
        with self._lock:
            if self._free.get(size):
                self._waiting -= size
                return self._free[size].pop()
        return _memory(size)

    def give(self, memory: mmap.mmap) -> None:
        """Take it back; nobody may look at it any more."""
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)
            self._waiting += len(memory)
            while self._waiting > self._most:
                largest = max(size for size, some in self._free.items() if some)
                self._free[largest].pop()
                self._waiting -= largest


def read(path: Path, begin: int, end: int, buffers: Buffers) -> tuple[np.ndarray, mmap.mmap]:
    """Bytes of a file, and the memory they are in; fewer than were asked for if the file is shorter."""
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
    """Bytes of a file in order. A piece is valid until the one after the next is read."""
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
    """A new file of a known size: its room is asked for at once, so that a full disk shows now.

    Raises:
        OSError: ENOSPC among others.
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
        """Write what is there, filled up to whole blocks."""
        count = self._filled + -self._filled % _ALIGN
        self._memory[self._filled : count] = 0
        view = memoryview(self._memory)[:count]  # type: ignore[arg-type]
        while view:  # a system call may write less, when a disk is about to be full
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
