"""Write the files of a plan: streamed, hashed and verified before they appear at their place.

Everything is written into "<out>.partial", next to the folder that was requested. Each finished file is read back, the
checksum of every tensor is compared, and a journal records it; an interrupted port continues after the last recorded
file. When all files are complete, the folder is renamed. Memory holds a few slabs of at most ``SLAB`` bytes (or one
tensor, if a tensor cannot be cut). The sources are read and hashed ahead (``stream``), one slab is filled while the
previous one is written, and a finished file is read back while the next one is written.
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
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from .direct import Writer, pieces
from .output import Output, Shard
from .reader import Checkpoint
from .stream import Slab, stream

__all__ = ["SLAB", "Progress", "Refused", "Session", "checksum", "digest", "session"]

SLAB = 64 * 2**20
_PIECE = 2**20  # bytes; small enough to stay in the processor's cache between reading and hashing
_SPARE = 64 * 2**20  # bytes of free space to leave on the disk
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
    """Return the SHA-256, or another hash, of bytes that come in pieces."""
    found = kind()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def checksum(pieces: Iterator[Any]) -> str:
    """Return the CRC-32 of bytes that come in pieces, with which written data is compared after reading it back."""
    return digest(pieces, _Crc)


class Refused(GdnError):
    """The written data is wrong, so none of it is kept."""


@dataclass
class Session:
    """A folder that is being written.

    Attributes:
        out: The final folder.
        partial: The folder in which files are written first.
        total: The number of bytes to write.
        progress: Called with the name of the current item, the bytes done and the bytes in total.
        exact: Whether SHA-256 is computed of what is written (the way back) or of what is read (a port).
        checksums: The CRC-32 of every tensor written.
        hashes: The SHA-256 of the original's tensors, as they were written or read.
        done: The number of bytes written.
        finished: What the journal says about files that were finished.
        resumed: The number of files that an earlier attempt finished.
        overflow: For each tensor concerned, the number of elements that a cast made infinite or NaN.
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
    overflow: dict[str, int] = field(default_factory=dict)
    _hashed: set[str] = field(default_factory=set)

    def write(
        self, shards: Sequence[Shard], source: Checkpoint, array: Callable[[str], np.ndarray] | None = None
    ) -> None:
        """Write files, except those that an earlier attempt finished; ``array`` replaces ``source`` for reading
        tensors.

        Raises:
            GdnError: The data that was read back differs from what was written, or the disk is full.
        """
        todo = []
        for shard in shards:
            if self._finished(shard):
                self._tell(shard.name, shard.nbytes)
            else:
                todo.append(shard)
        read = None if self.exact else self.hashes
        slabs = stream(chain.from_iterable(shard.outputs for shard in todo), source, SLAB, read, array, self.overflow)
        with ThreadPoolExecutor(1) as sink, ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as verifier:
            checks: list[Future[None]] = []
            try:
                with closing(slabs):
                    for shard in todo:
                        sources = {} if self.exact else self._hashing(shard, source, hasher, array is not None)
                        self._shard(shard, source, slabs, sink, hasher)
                        checks.append(verifier.submit(self._verify, shard, source, sources))
                        while len(checks) > 2:
                            checks.pop(0).result()
                for check in checks:
                    check.result()
            finally:
                for pool in (sink, hasher, verifier):
                    pool.shutdown(wait=True, cancel_futures=True)

    def _finished(self, shard: Shard) -> bool:
        """Whether an earlier attempt finished this file and it has not changed since."""
        note = self.finished.get(shard.name)
        path = self.partial / shard.name
        if note is None or not path.is_file() or _found(path, shard) != note["checksums"]:
            return False
        self.checksums.update(note["checksums"])
        self.hashes.update(note["hashes"])
        self.overflow.update(note.get("overflow", {}))
        self.resumed += 1
        return True

    def _tell(self, what: str, more: int) -> None:
        self.done += more
        self.progress(what, self.done, self.total)

    def _hashing(
        self, shard: Shard, source: Checkpoint, hasher: ThreadPoolExecutor, computed: bool
    ) -> dict[str, Future[str]]:
        """Start to hash those sources of a file that are not hashed while they are read or written."""
        found = {}
        for output in shard.outputs:
            for name in _stored(output, source):
                alone = source.where[name][1].nbytes > SLAB or computed or name in source.regrouped
                if alone and not _verbatim(output, source) and name not in self.hashes and name not in self._hashed:
                    self._hashed.add(name)
                    found[name] = hasher.submit(_hash_of, source, name)
        return found

    def _shard(
        self,
        shard: Shard,
        source: Checkpoint,
        slabs: Iterator[Slab],
        sink: ThreadPoolExecutor,
        hasher: ThreadPoolExecutor,
    ) -> None:
        """Write one file under a temporary name."""
        part = self.partial / (shard.name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        states: list[tuple[Output, _Crc, Any]] = []
        pending: list[Future[None]] = []

        def settle() -> None:
            while pending:
                pending.pop(0).result()

        with Writer(part, shard.nbytes) as file:
            file.write(shard.header)
            self._tell(shard.name, len(shard.header))
            for output in shard.outputs:
                crc, sha = _Crc(), None
                if self.exact or (_verbatim(output, source) and output.nbytes > SLAB):
                    sha = hashlib.sha256()
                states.append((output, crc, sha))
                for _ in output.slabs(SLAB):
                    data = next(slabs).data
                    settle()
                    if len(data) > _PIECE:
                        pending.append(sink.submit(_put, file, crc, data))
                        if sha is not None:
                            pending.append(hasher.submit(sha.update, data))
                    else:  # handing the slab to the other thread would take longer than writing it here
                        _put(file, crc, data)
                        if sha is not None:
                            sha.update(data)
                    self._tell(output.name, len(data))
            settle()
            file.write(shard.trailer)
            self._tell(shard.name, len(shard.trailer))
        for output, crc, sha in states:
            self.checksums[output.name] = crc.hexdigest()
            if sha is not None:
                self.hashes[output.name if self.exact else str(output.verbatim)] = sha.hexdigest()

    def _verify(self, shard: Shard, source: Checkpoint, sources: Mapping[str, Future[str]]) -> None:
        """Read a file back, compare the checksum of every tensor, rename the file and record it in the journal.

        The journal is compared with the files before it is believed, so the order in which they reach the disk does not
        matter.
        """
        part = self.partial / (shard.name + ".part")
        if shard.nbytes > SLAB:
            _sync(part)
        wanted = {output.name: self.checksums[output.name] for output in shard.outputs}
        for name, found in _found(part, shard).items():
            if found != wanted.get(name):
                raise GdnError(f"{name} in {part} is not what was written; the disk or its driver is at fault.")
        for name, hashed in sources.items():
            self.hashes[name] = hashed.result()
        os.replace(part, self.partial / shard.name)
        names = [(output.name,) if self.exact else _stored(output, source) for output in shard.outputs]
        note = {
            "file": shard.name,
            "checksums": wanted,
            "hashes": {name: self.hashes[name] for name in chain.from_iterable(names)},
            "overflow": {name: self.overflow[name] for name in chain(wanted, *names) if name in self.overflow},
        }
        with (self.partial / _JOURNAL).open("a") as journal:
            journal.write(json.dumps(note) + "\n")

    def copy(self, name: str, path: Path) -> str:
        """Copy a file unchanged, read it back, and return its SHA-256.

        Raises:
            GdnError: The data that was read back differs from what was written.
        """
        out = self.partial / name
        out.parent.mkdir(parents=True, exist_ok=True)
        size, found = path.stat().st_size, hashlib.sha256()
        with out.open("wb") as file:
            for piece in pieces(path, 0, size):
                found.update(piece)
                file.write(piece)
                self._tell(name, len(piece))
        if digest(pieces(out, 0, size)) != found.hexdigest():
            raise GdnError(f"{out} is not what was written; the disk or its driver is at fault.")
        return found.hexdigest()

    def text(self, name: str, content: str | bytes) -> None:
        """Write a small file."""
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _stored(output: Output, source: Checkpoint) -> tuple[str, ...]:
    """Return the stored tensors from which an output is made."""
    return tuple(part for name in output.sources for part in source.stored(name))


def _verbatim(output: Output, source: Checkpoint) -> bool:
    """Whether the bytes of an output are those of a stored tensor."""
    return output.verbatim is not None and source.stored(output.verbatim) == (output.verbatim,)


def _hash_of(source: Checkpoint, name: str) -> str:
    return digest(source.chunks(name))


def _found(path: Path, shard: Shard) -> dict[str, str]:
    """Return the checksum of each tensor of a file, read back; faults elsewhere in the file have keys of their own."""
    if path.stat().st_size != shard.nbytes:
        return {"size": ""}
    found: dict[str, str] = {}
    left = pieces(path, 0, shard.nbytes)
    rest = memoryview(b"")

    def some(count: int) -> Iterator[memoryview]:
        nonlocal rest
        while count:
            rest = rest or next(left, rest)
            if not rest:
                return
            piece, rest = rest[:count], rest[count:]
            count -= len(piece)
            yield piece

    if b"".join(map(bytes, some(len(shard.header)))) != shard.header:
        found["header"] = ""
    found.update({output.name: checksum(some(output.nbytes)) for output in shard.outputs})
    return found if b"".join(map(bytes, some(len(shard.trailer)))) == shard.trailer else {**found, "trailer": ""}


def _put(file: Writer, crc: _Crc, data: memoryview) -> None:
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        crc.update(piece)
        file.write(piece)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def session(out: Path, fingerprint: str, total: int, progress: Progress, exact: bool = False) -> Iterator[Session]:
    """Begin or continue to write a folder; it is renamed to ``out`` when the block ends without an error.

    Raises:
        GdnError: ``out`` exists, or the disk has too little space or became full (then all written data is removed).
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
    except Refused:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(partial, ignore_errors=True)
            raise GdnError(
                f"the disk of {out.absolute().parent} became full; what had been written was removed."
            ) from error
        raise


def _settle(current: Session) -> None:
    for path in (*current.partial.rglob("*"), current.partial):
        _sync(path)
    (current.partial / _JOURNAL).unlink()
    (current.partial / "fingerprint").unlink()  # removed last, because a folder without it is taken for someone else's
    os.rename(current.partial, current.out)


def _continue(current: Session, fingerprint: str) -> None:
    """Take over what an earlier attempt at the same port finished, or start from nothing."""
    partial = current.partial
    mark = partial / "fingerprint"
    if partial.exists() and any(partial.iterdir()):  # an empty folder is left by an attempt that was killed at once
        if not mark.is_file():
            raise bad(str(partial), "there and not of an interrupted port", "be removed or renamed first")
        if mark.read_text() == fingerprint and (partial / _JOURNAL).is_file():
            _read_journal(current)
        else:
            shutil.rmtree(partial)
    if not mark.is_file():
        partial.mkdir(exist_ok=True)
        mark.write_text(fingerprint)
    (partial / _JOURNAL).touch()
    for path in partial.rglob("*.part"):
        path.unlink()


def _read_journal(current: Session) -> None:
    """Read what an earlier attempt recorded; each record is checked against its file later."""
    for line in (current.partial / _JOURNAL).read_text().splitlines():
        try:
            note = json.loads(line)
            current.finished[note["file"]] = note
        except (ValueError, KeyError):
            break  # the last line may be incomplete if the process was killed
