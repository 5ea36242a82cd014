"""A checkpoint on disk: its files, every tensor's place, and tensors as arrays over mapped memory.

Only safetensors files are read: no pickle, nothing that could run. Headers are checked (``header``), and an index may
only name files of its own folder, which must hold what it says they hold.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from .direct import pieces
from .dtypes import dtype_of
from .header import MAX_TENSORS, Header, Tensor, read_header
from .table import Spec

__all__ = ["INDEX_SUFFIX", "Checkpoint", "read_json"]

INDEX_SUFFIX = ".safetensors.index.json"
_SMALL = 64 * 2**20  # bytes of a JSON file; an index of 76 thousand tensors has 8 MB
_MAPS = 256  # files that are mapped at a time; each takes a handle


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        GdnError: it cannot be read, is too large, or is no JSON object.
    """
    try:
        if path.stat().st_size > _SMALL:
            raise bad(str(path), f"{path.stat().st_size} bytes", f"have at most {_SMALL}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GdnError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        raise bad(str(path), "no JSON", "hold a JSON object") from None
    if not isinstance(found, dict):
        raise bad(str(path), f"a {type(found).__name__}", "hold a JSON object")
    return found


class Checkpoint:
    """The safetensors files of a folder (or one file), opened by their headers alone.

    path: what was opened. files: their paths by name. headers: by the same names. where: file and place of each tensor.
    config: of config.json beside them, empty if there is none. index: the index file's name, or None.
    """

    def __init__(self, path: Path, names: list[str] | None = None) -> None:
        """Open ``path``; ``names`` are the files to take, if not all that belong together.

        Raises:
            GdnError: there is no checkpoint, or its headers or index cannot be trusted.
        """
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.index: str | None = None
        listed: Mapping[str, str] | None = None
        if not path.exists():
            raise bad(str(path), "not there", "be a folder with safetensors files, or one such file")
        if names is None:
            names, listed = ([path.name], None) if path.is_file() else self._find()
        self.files = {name: self.folder / name for name in names}
        self.headers: dict[str, Header] = {name: read_header(file) for name, file in self.files.items()}
        self.where: dict[str, tuple[str, Tensor]] = {}
        for file, header in self.headers.items():
            for name, tensor in header.tensors.items():
                if name in self.where:
                    raise GdnError(f"{name} is in {self.where[name][0]} and in {file}; a tensor must be in one file.")
                self.where[name] = (file, tensor)
        if len(self.where) > MAX_TENSORS:
            raise bad(str(path), f"a checkpoint of {len(self.where)} tensors", f"have at most {MAX_TENSORS}")
        if listed is not None:
            self._check_index(listed)
        config = self.folder / "config.json"
        self.config = read_json(config) if config.is_file() else {}
        self._maps: dict[str, tuple[mmap.mmap, np.ndarray]] = {}
        self._asked: set[str] = set()

    def _find(self) -> tuple[list[str], Mapping[str, str] | None]:
        """Names of the files that make up the folder's checkpoint, and what its index says."""
        found = sorted(p.name for p in self.folder.glob("*.safetensors"))
        indices = sorted(p.name for p in self.folder.glob("*" + INDEX_SUFFIX))
        if not found:
            other = next((p.name for p in sorted(self.folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")), None)
            what = "without safetensors files" + (f"; {other} is a pickle, which is never read" if other else "")
            raise bad(str(self.folder), f"a folder {what}", "hold safetensors files")
        if len(indices) > 1:
            indices = [name for name in indices if name == "model" + INDEX_SUFFIX]
            if not indices:
                raise bad(str(self.folder), "a folder with several indices", "have one, or model" + INDEX_SUFFIX)
        if not indices:
            return found, None
        self.index = indices[0]
        listed = read_json(self.folder / self.index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
            raise bad(str(self.folder / self.index), "without a weight_map of names", "map tensors to files")
        for file in dict.fromkeys(listed.values()):
            if file != Path(file).name or not file.endswith(".safetensors") or "\\" in file or "\0" in file:
                raise GdnError(
                    f"{self.folder / self.index} points to {file[:80]!r}; it must name safetensors files of its "
                    f"own folder."
                )
            if file not in found:
                raise GdnError(f"{self.folder / self.index} names {file}, which is not there; every shard must be.")
        return sorted(dict.fromkeys(listed.values())), listed

    def _check_index(self, listed: Mapping[str, str]) -> None:
        for name, file in listed.items():
            if name not in self.where or self.where[name][0] != file:
                raise GdnError(
                    f"{self.index} says that {name[:80]} is in {file}, and it is not; index and files must agree."
                )
        for name, (file, _) in self.where.items():
            if name not in listed:
                raise GdnError(f"{file} holds {name}, which {self.index} does not name; index and files must agree.")

    @property
    def inventory(self) -> dict[str, Spec]:
        """What is there, in the order of files and of data in them."""
        return {name: Spec(tensor.dtype, tensor.shape) for name, (_, tensor) in self.where.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of data of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.where.values())

    def array(self, name: str) -> np.ndarray:
        """A tensor as a read-only array over mapped memory; nothing is read until it is looked at."""
        file, tensor = self.where[name]
        if file not in self._maps:
            if len(self._maps) >= _MAPS:
                del self._maps[next(iter(self._maps))]  # arrays over it keep it
            with self.files[file].open("rb") as handle:
                mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[file] = (mapped, np.frombuffer(mapped, np.uint8))
        data = self._maps[file][1][tensor.begin : tensor.end]
        return data.view(dtype_of(tensor.dtype)).reshape(tensor.shape)

    def prefetch(self, name: str) -> None:
        """Ask the system to read a tensor soon."""
        file, tensor = self.where[name]
        if name not in self._asked and hasattr(os, "posix_fadvise"):
            self._asked.add(name)
            with self.files[file].open("rb", buffering=0) as handle:
                os.posix_fadvise(handle.fileno(), tensor.begin, tensor.nbytes, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """Let the pages that were looked at go from this process; the system keeps them as long as it likes."""
        for mapped, _ in self._maps.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes in order, not through mapped memory. A piece is valid until the one after the next is
        read."""
        file, tensor = self.where[name]
        left = tensor.nbytes
        for piece in pieces(self.files[file], tensor.begin, tensor.end):
            left -= len(piece)
            yield piece
        if left:
            raise GdnError(f"{self.files[file]} became shorter while it was read; it must not change.")
