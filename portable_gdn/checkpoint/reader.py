"""A checkpoint on disk: its files, the place of every tensor, and tensors as memory-mapped arrays.

Only safetensors files are read: no pickles, and nothing that could execute code. Headers are checked (``header``). An
index may only name files in its own folder, and these must hold the tensors that it lists for them.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from .direct import pieces
from .dtypes import dtype_of
from .header import MAX_TENSORS, Header, Tensor, read_header, what_else
from .table import Spec

__all__ = ["INDEX_SUFFIX", "Checkpoint", "Regrouped", "read_json"]

INDEX_SUFFIX = ".safetensors.index.json"
_ADAPTER = re.compile(r"adapter_model(-.*)?\.safetensors")
_ONE_OF = re.compile(r"(?P<stem>.+)-(?P<n>\d+)-of-(?P<of>\d+)\.safetensors")
_MOST_FILES = 100_000  # the largest count that a shard's name may state
_SMALL = 64 * 2**20  # the largest size of a JSON file in bytes; the index of 76 thousand tensors has 8 MB
_MAPS = 256  # the most files mapped at a time, because each needs a file handle


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        GdnError: The file cannot be read, is too large, or does not hold a JSON object.
    """
    try:
        if path.stat().st_size > _SMALL:
            raise bad(str(path), f"{path.stat().st_size} bytes", f"have at most {_SMALL}")
        found = json.loads(path.read_text(encoding="utf-8-sig"))  # skips a byte-order mark
    except OSError as error:
        raise GdnError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        with path.open("rb") as file:
            what = what_else(file.read(64))
        raise bad(str(path), what or "no JSON", "hold a JSON object") from None
    if not isinstance(found, dict):
        raise bad(str(path), f"a {type(found).__name__}", "hold a JSON object")
    return found


@dataclass(frozen=True)
class Regrouped:
    """A tensor that differs from what the files hold under its name: some rows of several stored tensors, concatenated.

    Attributes:
        parts: The names of the stored tensors, in order.
        begin: The first row, counted over all parts.
        rows: The number of rows.
    """

    parts: tuple[str, ...]
    begin: int
    rows: int


class Checkpoint:
    """The safetensors files of a folder (or a single file); opening reads only their headers.

    Attributes:
        path: The path that was opened.
        files: The paths of the files by name.
        headers: The headers of the files by name.
        where: The file and position of each tensor.
        config: The contents of config.json in the same folder, empty if there is none.
        index: The name of the index file, or None.
        hint: A suspicion about what was opened, which messages about other errors add.
        regrouped: The tensors that are cut differently in the files.
    """

    hint = ""
    regrouped: Mapping[str, Regrouped] = MappingProxyType({})

    def __init__(self, path: Path, names: list[str] | None = None) -> None:
        """Open ``path``; ``names`` limits it to these files (by default, all that belong together).

        Raises:
            GdnError: There is no checkpoint, or its headers or index are not consistent.
        """
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.index: str | None = None
        listed: Mapping[str, str] | None = None
        if not path.exists():
            raise bad(str(path), "not there", "be a folder with safetensors files, or one such file")
        if names is None:
            names, listed = ([path.name], None) if path.is_file() else self._find()
            one = _ONE_OF.fullmatch(path.name) if path.is_file() else None
            if one and int(one["of"]) > 1:
                self.hint = f" {path.name} is one of {int(one['of'])} files; their folder must be given."
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
        """Return the names of the files that make up the folder's checkpoint, and the contents of its index."""
        found = sorted(p.name for p in self.folder.glob("*.safetensors"))
        indices = sorted(p.name for p in self.folder.glob("*" + INDEX_SUFFIX))
        if not found:
            other = next((p.name for p in sorted(self.folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")), None)
            what = "without safetensors files" + (f"; {other} is a pickle, which is never read" if other else "")
            raise bad(str(self.folder), f"a folder {what}", "hold safetensors files")
        _one_model(self.folder, found)
        if len(indices) > 1:
            indices = [name for name in indices if name == "model" + INDEX_SUFFIX]
            if not indices:
                raise bad(str(self.folder), "a folder with several indices", "have one, or model" + INDEX_SUFFIX)
        if not indices:
            lacking = _lacking(found)
            if lacking:
                raise GdnError(
                    f"{self.folder} is not complete: {_some(lacking)} {'is' if len(lacking) == 1 else 'are'} not "
                    f"there, by the numbers in the names of {_some(found)}; every file of a checkpoint must be."
                )
            return found, None
        self.index = indices[0]
        listed = read_json(self.folder / self.index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
            raise bad(str(self.folder / self.index), "without a weight_map of names", "map tensors to files")
        if not listed:
            raise GdnError(
                f"{self.folder / self.index} names no tensor, and beside it lies {_some(found)}; it must name those of "
                f"the files, or be removed."
            )
        names = list(dict.fromkeys(listed.values()))
        for file in names:
            if file != Path(file).name or not file.endswith(".safetensors") or "\\" in file or "\0" in file:
                raise GdnError(
                    f"{self.folder / self.index} points to {file[:80]!r}; it must name safetensors files of its "
                    f"own folder."
                )
        missing = [file for file in names if file not in found]
        if missing:
            tensors = [name for name, file in listed.items() if file in missing]
            raise GdnError(
                f"{self.folder / self.index} names {_some(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
                f"there and would hold {_some(tensors)}; every shard must be there."
            )
        lacking = _lacking(names)
        if lacking:
            raise GdnError(
                f"{self.folder / self.index} does not name {_some(lacking)}, by the numbers in the names of its other "
                f"files; it must name every file of the checkpoint."
            )
        single = self.index.removesuffix(INDEX_SUFFIX) + ".safetensors"
        if single in found and single not in names:
            raise GdnError(
                f"{self.folder} holds {single} and {self.index}, which names other files: two checkpoints, of which "
                f"programs take the one or the other; one of them must go, or a file itself must be named."
            )
        return sorted(names), listed

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
        """All tensors, in the order of the files and of the data in them."""
        found = {name: Spec(tensor.dtype, tensor.shape) for name, (_, tensor) in self.where.items()}
        for name, group in self.regrouped.items():
            found[name] = Spec(found[name].dtype, (group.rows, *found[name].shape[1:]))
        return found

    def regroup(self, found: Mapping[str, Regrouped]) -> None:
        """Treat these tensors as cut in this way from now on; the names and the files do not change."""
        self.regrouped = {**self.regrouped, **found}

    @property
    def nbytes(self) -> int:
        """The number of bytes of data of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.where.values())

    def stored(self, name: str) -> tuple[str, ...]:
        """Return the stored tensors from which a tensor of the inventory is made: itself, unless it is regrouped."""
        return self.regrouped[name].parts if name in self.regrouped else (name,)

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only, memory-mapped array; nothing is read until elements are used.

        A regrouped tensor is a copy.
        """
        group = self.regrouped.get(name)
        if group is None:
            return self._mapped(name)
        return np.concatenate([self._mapped(part) for part in group.parts])[group.begin : group.begin + group.rows]

    def _mapped(self, name: str) -> np.ndarray:
        file, tensor = self.where[name]
        if file not in self._maps:
            if len(self._maps) >= _MAPS:
                del self._maps[next(iter(self._maps))]  # arrays that use the mapping keep it alive
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
        """Release the mapped pages that this process has read; the system may keep them in its cache."""
        for mapped, _ in self._maps.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes in order, without memory mapping.

        A piece is valid until the piece after the next is read.
        """
        file, tensor = self.where[name]
        left = tensor.nbytes
        for piece in pieces(self.files[file], tensor.begin, tensor.end):
            left -= len(piece)
            yield piece
        if left:
            raise GdnError(f"{self.files[file]} became shorter while it was read; it must not change.")


def _some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(name[:80] for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _lacking(names: list[str]) -> list[str]:
    """Return missing files that the names of the others ("-00001-of-00003") imply."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        found = _ONE_OF.fullmatch(name)
        if found and int(found["of"]) <= _MOST_FILES:
            sets.setdefault((found["stem"], found["of"]), {})[int(found["n"])] = found["n"]
    lacking = []
    for (stem, of), have in sets.items():
        width = len(next(iter(have.values())))
        first = 0 if 0 in have else 1
        lacking += [f"{stem}-{n:0{width}d}-of-{of}.safetensors" for n in range(first, int(of) + first) if n not in have]
    return lacking


def _one_model(folder: Path, found: list[str]) -> None:
    """Refuse an adapter next to a model: it is not known whether it was merged, so the user must say what is meant."""
    adapters = [name for name in found if _ADAPTER.fullmatch(name)]
    if adapters and len(adapters) < len(found):
        models = [name for name in found if name not in adapters]
        raise GdnError(
            f"{folder} holds a model ({_some(models)}) and an adapter ({_some(adapters)}) beside it, and whether the "
            f"adapter was merged into the model cannot be told; move the adapter to a folder of its own, and port it "
            f"with --base if it was not merged."
        )
