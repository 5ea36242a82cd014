"""Safetensors files, tensor by tensor, with numpy alone.

The safetensors package writes a file from tensors that are all in memory; here a file may be larger than that. Bytes
go to an unnamed file as they come, and header and bytes are put together under the final name when all is there: an
interrupted writer leaves nothing behind.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from ..spec.errors import GdnError

__all__ = ["TensorFile", "TensorWriter", "cannot_write"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "BOOL": np.dtype(bool),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def cannot_write(path: Path, nbytes: int, error: OSError) -> GdnError:
    """The error of a file that cannot be written: which, why, what it needs and what is free."""
    said = f"{path}: the file cannot be written ({error.strerror or error})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return GdnError(f"{said}.")
    free = shutil.disk_usage(path.parent).free
    need = f"it needs more than {nbytes / 2**20:.1f} MiB" if nbytes else "it needs space"
    return GdnError(f"{said}; {need}, twice that while it is put together, and {free / 2**20:.1f} MiB are free.")


class TensorWriter:
    """``with TensorWriter(path) as out: out.add(name, array)``; the file is there once the block has ended well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self._entries: dict[str, Any] = {}
        try:
            self._data = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise cannot_write(path, 0, error) from error

    def __enter__(self) -> TensorWriter:
        return self

    def add(self, name: str, array: np.ndarray) -> None:
        """Append one tensor."""
        array = np.ascontiguousarray(array)
        begin = self._data.tell()
        try:
            self._data.write(array.tobytes())
            self._data.flush()
        except OSError as error:
            raise cannot_write(self.path, begin + array.nbytes, error) from error
        self._entries[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, self._data.tell()],
        }

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            size = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
            raise cannot_write(self.path, size, error) from error
        finally:
            with suppress(OSError):  # what is still to be written to an unnamed file is not missed
                self._data.close()

    def _finish(self) -> None:
        header = json.dumps({"__metadata__": self.metadata, **self._entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the data begins at a multiple of 8 bytes
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                self._data.seek(0)
                shutil.copyfileobj(self._data, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # mkstemp lets only its owner read
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class TensorFile:
    """A safetensors file to read from, one tensor at a time.

    Attributes:
        metadata: strings by name.
        shapes: of each tensor, in the file's order.

    Raises:
        GdnError: the file cannot be read, is none, or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                first = file.read(8)
                self._start = 8 + int.from_bytes(first, "little")
                if len(first) < 8 or self._start > size:
                    raise GdnError(f"{path}: the file is not safetensors, or it is cut short in its header.")
                text = file.read(self._start - 8)
        except OSError as error:
            raise GdnError(f"{path}: the file cannot be read ({error.strerror}).") from error
        try:
            header = json.loads(text)
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
            self._entries = {
                name: (entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
                for name, entry in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GdnError(f"{path}: the safetensors header is not valid.") from error
        for name, (dtype, shape, begin, end) in self._entries.items():
            if dtype not in _DTYPES:
                raise GdnError(f"{path}: tensor {name} has dtype {dtype}; it must be one of {', '.join(_DTYPES)}.")
            inside = 0 <= begin <= end <= size - self._start and min(shape, default=0) >= 0
            if not inside or end - begin != _DTYPES[dtype].itemsize * math.prod(shape):
                raise GdnError(
                    f"{path}: tensor {name} of shape {shape} takes bytes {begin} to {end} of {size - self._start}; "
                    f"the file is cut short or its header is wrong."
                )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return {name: entry[1] for name, entry in self._entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str) -> np.ndarray:
        """One tensor, writable and owned by the caller."""
        dtype, shape, begin, end = self._entries[name]
        with self.path.open("rb") as file:
            file.seek(self._start + begin)
            return np.frombuffer(bytearray(file.read(end - begin)), _DTYPES[dtype]).reshape(shape)
