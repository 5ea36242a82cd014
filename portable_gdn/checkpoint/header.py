"""Read the header of a safetensors file and check all of it before it is used.

A file consists of 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape, data_offsets)
and the data. Everything that later addresses memory is checked here: the header's length against the file's, offsets
against the data, sizes against shapes, and that the tensors fill the data without gaps or overlaps.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..spec.errors import GdnError
from .dtypes import NAMES, itemsize

__all__ = [
    "MAX_HEADER",
    "MAX_NAME",
    "MAX_TENSORS",
    "Header",
    "Tensor",
    "parse_header",
    "parse_name",
    "read_header",
    "what_else",
]

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package
MAX_TENSORS = 1_000_000  # in one checkpoint; a model of 80 billion parameters with 512 experts has 76 thousand
MAX_NAME = 512
MAX_RANK = 16

# Letters, digits and the other characters of module paths, but no path separators. Parts between dots must not be
# empty, which excludes "..".
_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its dtype (by the file's name for it), its shape, and the range of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of its data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: its own bytes (including the length), the tensors in the order of their data, and metadata."""

    raw: bytes
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read the header of a file and check it.

    Raises:
        GdnError: The file is not a safetensors file, or its header is not consistent.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > size - 8:
                file.seek(0)
                what = what_else(file.read(64))
                if what:
                    raise GdnError(f"{path} is {what}; it must be a safetensors file.")
                raise _refuse(path, f"it has {size} bytes and its header claims {length}", "be whole")
            if length > MAX_HEADER:
                raise _refuse(path, f"its header claims {length} bytes", f"have at most {MAX_HEADER}")
            raw = first + file.read(length)
    except OSError as error:
        raise GdnError(f"{path} cannot be read: {error.strerror or error}.") from error
    return parse_header(path, raw, size)


_BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of git-lfs to a file that was not fetched (git lfs pull fetches it)"),
    (b"<!DOCTYPE", "a page of HTML, as a failed download leaves it"),
    (b"<html", "a page of HTML, as a failed download leaves it"),
    (b"<?xml", "a page of XML, as a failed download leaves it"),
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it (a pickle, which is never read)"),
    (b"\x80\x02", "a pickle, which is never read"),
    (b"\x89HDF", "an HDF5 file"),
)


def what_else(beginning: bytes) -> str | None:
    """Name the type of a file that should have been something else, from its first bytes; None if they do not tell."""
    start = beginning.lstrip()
    return next((what for mark, what in _BEGINNINGS if start[: len(mark)].lower() == mark.lower()), None)


def parse_header(path: Path, raw: bytes, size: int) -> Header:
    """Check the bytes of a header (including the 8 bytes of its length) against the size of its file.

    Raises:
        GdnError: A reason given in ``read_header``.
    """
    start = len(raw)
    try:
        found = json.loads(raw[8:].decode("utf-8"), object_pairs_hook=_unique)
    except _Twice as error:
        raise _refuse(path, f"its header names {str(error)!r} twice", "name each tensor once") from None
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"its header is no JSON ({type(error).__name__})", "be a safetensors file") from None
    if not isinstance(found, dict):
        raise _refuse(path, f"its header is a {type(found).__name__}", "be a safetensors file")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _refuse(path, "its __metadata__ holds other things than text", "hold text only")
    if metadata.get("format") == "portable-gdn-run":
        raise GdnError(
            f"{path} is a recording of `portable-gdn record`, which compare and doctor read; it must be a checkpoint."
        )
    if len(found) > MAX_TENSORS:
        raise _refuse(path, f"it names {len(found)} tensors", f"have at most {MAX_TENSORS}")
    tensors = sorted(
        ((name, _tensor(path, name, item, start, size)) for name, item in found.items()),
        key=lambda pair: (pair[1].begin, pair[1].end),
    )
    at = start
    for name, tensor in tensors:
        if tensor.begin != at:
            what = "overlaps another" if tensor.begin < at else "leaves a gap before it"
            raise _refuse(path, f"tensor {name!r} {what}", "hold its tensors one after the other")
        at = tensor.end
    if at != size:
        raise _refuse(path, f"its tensors end at byte {at} of {size}", "end with its last tensor")
    return Header(raw, dict(tensors), metadata)


def parse_name(path: Path, name: str) -> None:
    """Check the name of a tensor, because it may become part of a path.

    Raises:
        GdnError: It has characters other than letters, digits, "_", "-" and single dots, or is too long.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise _refuse(
            path, f"it names a tensor {name[:80]!r}", "use names of letters, digits, '_', '-' and single dots"
        )


def _refuse(path: Path, was: str, must: str) -> GdnError:
    return GdnError(f"{path} cannot be trusted: {was}; it must {must}.")


class _Twice(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise _Twice(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def _tensor(path: Path, name: str, item: Any, start: int, size: int) -> Tensor:
    short = name[:80]
    parse_name(path, name)
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise _refuse(path, f"tensor {short!r} is not described by dtype, shape and data_offsets", "describe each so")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NAMES:
        raise _refuse(path, f"tensor {short!r} has dtype {str(dtype)[:40]!r}", f"use one of {', '.join(NAMES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_whole, shape)):
        raise _refuse(path, f"tensor {short!r} has shape {str(shape)[:80]}", "have shapes of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise _refuse(path, f"tensor {short!r} has offsets {str(offsets)[:80]}", "have two whole numbers there")
    begin, end = offsets[0] + start, offsets[1] + start
    if not begin <= end <= size:
        raise _refuse(path, f"tensor {short!r} lies at {offsets} of {size - start} bytes of data", "lie inside them")
    wanted = prod(shape) * itemsize(dtype)
    if end - begin != wanted:
        raise _refuse(
            path, f"tensor {short!r} has {end - begin} bytes for {dtype} {shape}", f"have the {wanted} that this takes"
        )
    return Tensor(dtype, tuple(shape), begin, end)
