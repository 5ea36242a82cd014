"""Write the files of a plan: streamed, hashed, verified, and only then in place.

Everything is written into "<out>.partial" beside the folder that was asked for. A finished file has been read back and
every tensor's checksum compared; a journal says so, and a port that was interrupted continues behind it. When all files
are there the folder is renamed. Memory holds two slabs of at most ``SLAB`` bytes (or one tensor, where a tensor cannot
be cut).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from .plan import Output, Shard
from .reader import Checkpoint

__all__ = ["SLAB", "Progress", "Session", "checksum", "data_of", "digest", "session"]

SLAB = 64 * 2**20
_PIECE = 2**20  # stays in the processor's cache between being read and being hashed
_SPARE = 64 * 2**20  # bytes of the disk to leave free
_AHEAD = 3  # slabs that are read before they are needed
_JOURNAL = "journal.jsonl"
Progress = Callable[[str, int, int], None]


class _Crc:
    """CRC-32 with the interface of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def digest(pieces: Iterator[Any], kind: Callable[[], Any] = hashlib.sha256) -> str:
    """SHA-256, or another hash, of bytes that come in pieces."""
    found = kind()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def checksum(pieces: Iterator[Any]) -> str:
    """CRC-32 of bytes that come in pieces: what is written is compared with what is read back by it."""
    return digest(pieces, _Crc)


@dataclass
class Session:
    """A folder being written.

    exact: whether what is written is hashed by SHA-256 (the way back), or what is read (a port). checksums: CRC-32 of
    every tensor written. hashes: SHA-256 of tensors of the original, as they were written or read.
    """

    out: Path
    partial: Path
    total: int
    progress: Progress
    exact: bool = False
    checksums: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    done: int = 0
    finished: dict[str, Any] = field(default_factory=dict)
    resumed: int = 0

    def write(
        self, shards: Sequence[Shard], source: Checkpoint, array: Callable[[str], np.ndarray] | None = None
    ) -> None:
        """Write files, except those that an earlier attempt finished; ``array`` gives tensors, if not ``source``.

        Raises:
            GdnError: what was read back is not what was written, or the disk is full.
        """
        buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]  # one is filled while the other is written
        with ThreadPoolExecutor(1) as sink, ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as verifier:
            sources: dict[str, Future[str]] = {}
            checks: list[Future[None]] = []
            try:
                for shard in shards:
                    if self._finished(shard):
                        self._tell(shard.name, shard.nbytes)
                        continue
                    names = self._shard(shard, source, array or source.array, buffers, sink, hasher, sources)
                    checks.append(verifier.submit(self._verify, shard, names, sources))
                    while len(checks) > 2:
                        checks.pop(0).result()
                for check in checks:
                    check.result()
            finally:
                for pool in (sink, hasher, verifier):
                    pool.shutdown(wait=True, cancel_futures=True)

    def _finished(self, shard: Shard) -> bool:
        """Whether an earlier attempt finished this file, and it is still as it was."""
        note = self.finished.get(shard.name)
        path = self.partial / shard.name
        if note is None or not path.is_file() or _found(path, shard) != note["checksums"]:
            return False
        self.checksums.update(note["checksums"])
        self.hashes.update(note["hashes"])
        self.resumed += 1
        return True

    def _tell(self, what: str, more: int) -> None:
        self.done += more
        self.progress(what, self.done, self.total)

    def _shard(
        self,
        shard: Shard,
        source: Checkpoint,
        array: Callable[[str], np.ndarray],
        buffers: list[np.ndarray],
        sink: ThreadPoolExecutor,
        hasher: ThreadPoolExecutor,
        sources: dict[str, Future[str]],
    ) -> list[str]:
        """Write one file under a temporary name; the names of the original's tensors that are to be hashed."""
        part = self.partial / (shard.name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        used = [output.name for output in shard.outputs] if self.exact else []
        with part.open("wb", buffering=0) as file:
            if hasattr(os, "posix_fallocate") and shard.nbytes:
                os.posix_fallocate(file.fileno(), 0, shard.nbytes)  # a full disk shows now
            _write(file, shard.header)
            self._tell(shard.name, len(shard.header))
            pending: Future[None] | None = None
            touched = 0
            pieces = [(output, slab) for output in shard.outputs for slab in output.slabs(SLAB)]
            wanted = [output.sources_of(slab) for output, slab in pieces]
            states: list[Any] = []
            for n, (output, slab) in enumerate(pieces):
                for name in chain.from_iterable(wanted[n : n + 1 + _AHEAD]):
                    self._ahead(name, source, hasher, sources, output.verbatim)
                for name in wanted[n]:
                    if name in sources and source.where[name][1].nbytes <= SLAB:
                        sources[name].result()  # hashed, and so read: what is mapped now need not wait for the disk
                same = output.verbatim
                if not states:
                    used += [] if self.exact else output.sources
                    states = [_Crc()] + [hashlib.sha256()] * (self.exact or same is not None)
                for data in data_of(output, slab, source, array, buffers):
                    if pending is not None:
                        pending.result()
                        pending = None
                    if len(data) > _PIECE:
                        pending = sink.submit(_put, file, states, data)
                    else:
                        _put(file, states, data)  # handing it over would take longer
                    self._tell(output.name, len(data))
                    touched += len(data)
                    if touched > 2 * SLAB:
                        source.release()
                        touched = 0
                if n + 1 < len(pieces) and pieces[n + 1][0] is output:
                    continue
                if pending is not None:
                    pending.result()
                    pending = None
                self.checksums[output.name] = states[0].hexdigest()
                if len(states) == 2:
                    self.hashes[output.name if self.exact else str(same)] = states[1].hexdigest()
                states = []
            _write(file, shard.trailer)
            self._tell(shard.name, len(shard.trailer))
        source.release()
        return used

    def _ahead(
        self,
        name: str,
        source: Checkpoint,
        hasher: ThreadPoolExecutor,
        sources: dict[str, Future[str]],
        verbatim: str | None,
    ) -> None:
        """Have a source tensor read soon, and hashed if it is to be."""
        if self.exact or source.where[name][1].nbytes > SLAB:
            source.prefetch(name)
        if not self.exact and name not in sources and name not in self.hashes and name != verbatim:
            sources[name] = hasher.submit(_hash_of, source, name)

    def _verify(self, shard: Shard, names: Sequence[str], sources: Mapping[str, Future[str]]) -> None:
        """Read a file back, compare every tensor's checksum, give it its name and note it in the journal.

        What a journal says is compared with the files before it is believed, so it need not reach the disk in order.
        """
        part = self.partial / (shard.name + ".part")
        if shard.nbytes > SLAB:
            _sync(part)
        wanted = {output.name: self.checksums[output.name] for output in shard.outputs}
        for name, found in _found(part, shard).items():
            if found != wanted.get(name):
                raise GdnError(f"{name} in {part} is not what was written; the disk or its driver is at fault.")
        for name in names:
            if name in sources:
                self.hashes[name] = sources[name].result()
        os.replace(part, self.partial / shard.name)
        note = {
            "file": shard.name,
            "checksums": wanted,
            "hashes": {name: self.hashes[name] for name in dict.fromkeys(names)},
        }
        with (self.partial / _JOURNAL).open("a") as journal:
            journal.write(json.dumps(note) + "\n")

    def text(self, name: str, content: str | bytes) -> None:
        """Write a small file."""
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def data_of(
    output: Output,
    slab: tuple[int, int],
    source: Checkpoint,
    array: Callable[[str], np.ndarray] | None = None,
    buffers: list[np.ndarray] | None = None,
) -> Iterator[Any]:
    """A slab's bytes to write. A piece is valid until the one after the next is asked for."""
    same = output.verbatim
    if same is not None:
        yield from source.chunks(same)
        return
    free = None
    if buffers is not None:
        buffers.reverse()
        free = buffers[0] = _grown(buffers[0], min(output.nbytes, 2 * SLAB))
    yield memoryview(output.fill(slab, array or source.array, free).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _grown(buffer: np.ndarray, size: int) -> np.ndarray:
    return buffer if buffer.nbytes >= size else np.empty(size, np.uint8)


def _hash_of(source: Checkpoint, name: str) -> str:
    return digest(source.chunks(name))


def _found(path: Path, shard: Shard) -> dict[str, str]:
    """Checksum of each tensor in a file as it is read; what is wrong with the rest stands under its own name."""
    if path.stat().st_size != shard.nbytes:
        return {"size": ""}
    with path.open("rb", buffering=0) as file:
        found = {} if file.read(len(shard.header)) == shard.header else {"header": ""}
        found.update({output.name: checksum(_pieces(file, output.nbytes)) for output in shard.outputs})
        return found if file.read() == shard.trailer else {**found, "trailer": ""}


def _put(file: Any, states: Sequence[Any], data: Any) -> None:
    view = memoryview(data)
    for at in range(0, len(view), _PIECE):
        piece = view[at : at + _PIECE]
        for state in states:
            state.update(piece)
        _write(file, piece)


def _write(file: Any, data: Any) -> None:
    """All of it: a system call may write less, when a disk is about to be full."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _pieces(file: Any, count: int) -> Iterator[memoryview]:
    """Bytes of a file through one small buffer."""
    buffer = memoryview(bytearray(min(_PIECE, count)))
    while count:
        got = file.readinto(buffer[: min(_PIECE, count)])
        if not got:
            return
        count -= got
        yield buffer[:got]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def session(out: Path, fingerprint: str, total: int, progress: Progress, exact: bool = False) -> Iterator[Session]:
    """A folder to write, begun or continued; renamed to ``out`` when the block ends well.

    Raises:
        GdnError: ``out`` exists, the disk has not enough room, or became full (then nothing is left of the attempt).
    """
    if out.exists():
        raise bad(str(out), "there already", "be the name of a folder that does not exist")
    if not out.absolute().parent.is_dir():
        raise bad(str(out), "in a folder that does not exist", "be in one that does")
    partial = out.with_name(out.name + ".partial")
    current = Session(out, partial, total, progress, exact)
    _continue(current, fingerprint)
    places = [partial / name for name in current.finished]
    written = sum(path.stat().st_size for path in places if path.is_file())
    free = shutil.disk_usage(out.absolute().parent).free
    if total - written + _SPARE > free:
        if not current.finished:
            shutil.rmtree(partial)
        raise GdnError(
            f"{out.absolute().parent} has {free / 2**30:.1f} GiB free; the port must have "
            f"{(total - written + _SPARE) / 2**30:.1f}."
        )
    try:
        yield current
        _settle(current)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(partial, ignore_errors=True)
            raise GdnError(
                f"the disk of {out.absolute().parent} became full; what had been written was removed."
            ) from error
        raise


def _settle(current: Session) -> None:
    (current.partial / _JOURNAL).unlink()
    (current.partial / "fingerprint").unlink()
    for path in (*current.partial.rglob("*"), current.partial):
        _sync(path)
    os.rename(current.partial, current.out)


def _continue(current: Session, fingerprint: str) -> None:
    """Take over what an earlier attempt at the very same port finished; else start clean."""
    partial = current.partial
    mark = partial / "fingerprint"
    if partial.exists():
        if not mark.is_file():
            raise bad(str(partial), "there and not of an interrupted port", "be removed or renamed first")
        if mark.read_text() == fingerprint and (partial / _JOURNAL).is_file():
            _read_journal(current)
        else:
            shutil.rmtree(partial)
    if not partial.exists():
        partial.mkdir()
        mark.write_text(fingerprint)
    (partial / _JOURNAL).touch()
    for path in partial.rglob("*.part"):
        path.unlink()


def _read_journal(current: Session) -> None:
    """What an earlier attempt noted; whether it still holds is seen when its turn comes."""
    for line in (current.partial / _JOURNAL).read_text().splitlines():
        try:
            note = json.loads(line)
            current.finished[note["file"]] = note
        except (ValueError, KeyError):
            break  # the last line of a process that was killed
