"""Other files in a checkpoint's folder: a port copies their bytes without interpreting them, and the way back restores
them.

Configuration, tokenizer, licence and similar files keep their place in the port, so that other programs find them. All
others (files in subfolders, programs, pickles, safetensors files that the index does not name) are stored under
``source/files``, where no program looks for them. A repository's ``.git`` folder and other ports inside the folder are
not copied.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..spec.errors import GdnError
from .reader import INDEX_SUFFIX, Checkpoint

__all__ = ["FILE", "SOURCE", "Beside", "checked_name", "find_beside"]

FILE = "portable_gdn.json"
SOURCE = "source"
_PLACE = f"{SOURCE}/files/"
_KNOWN = (".json", ".txt", ".model", ".jinja", ".md", ".yaml", ".yml", ".tiktoken")
_LARGEST = 64 * 2**20  # bytes; a larger file does not keep its place but is stored under source/files
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Beside:
    """A file in the source's folder: ``name`` is its path there, with "/", and ``place`` the one in the port."""

    name: str
    path: Path
    size: int
    place: str

    @property
    def note(self) -> str:
        """A remark to show to the user about this file, or ""."""
        if self.name.endswith(".safetensors"):
            return f"{self.name} belongs to no tensor that is ported; it is carried as it is, and --back returns it"
        if self.name.endswith(_PICKLES):
            return f"{self.name} may be a pickle, which is never read; it is carried as it is, and --back returns it"
        return ""


def small(path: Path) -> bool:
    """Whether a file is configuration, a tokenizer or a licence, and not an index."""
    known = path.suffix in _KNOWN or path.name.upper().startswith(("LICENSE", "NOTICE"))
    ours = path.name == FILE or path.name.endswith(INDEX_SUFFIX)
    return known and not ours and path.is_file() and path.stat().st_size <= _LARGEST


def find_beside(
    checkpoint: Checkpoint, out: Path | None, moved: Collection[str] = ()
) -> tuple[list[Beside], tuple[str, ...]]:
    """Return the files to copy, and sentences about what is not copied.

    Args:
        checkpoint: The source. If the user named one of its files instead of its folder, only small files are copied.
        out: The folder to write, which may be inside the source's folder.
        moved: Names of small files that the port replaces by its own.

    Raises:
        GdnError: An entry of the folder is neither a file nor a folder, or is a broken link.
    """
    root = checkpoint.folder
    alone = checkpoint.path.is_file()
    outs = set() if out is None else {out.absolute(), out.absolute().with_name(out.name + ".partial")}
    own = {*checkpoint.files, checkpoint.index}
    found: list[Beside] = []
    left: list[str] = []
    for path in sorted(_walk(root, outs, left, deep=not alone)):
        name = path.relative_to(root).as_posix()
        if name in own or (alone and not small(path)):
            continue
        top = "/" not in name and small(path)
        place = name if top and name not in moved else f"{SOURCE}/{name}" if name == "config.json" else _PLACE + name
        found.append(Beside(name, path, path.stat().st_size, place))
    return found, tuple(left)


def _walk(folder: Path, outs: Collection[Path], left: list[str], deep: bool) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if path.absolute() in outs:
            continue
        if entry.is_dir(follow_symlinks=False):
            if not deep:
                continue
            if entry.name == ".git":
                left.append(f"{path} is a repository's own and is left where it is")
            elif (path / FILE).is_file() or (entry.name.endswith(".partial") and (path / "fingerprint").is_file()):
                left.append(f"{path} is a port and is left where it is")
            else:
                yield from _walk(path, outs, left, deep)
        elif entry.is_file():
            yield path
        elif deep:
            what = "a link to nothing" if entry.is_symlink() and not path.exists() else "no file"
            what = "a link to a folder" if path.is_dir() else what
            raise GdnError(f"{path} is {what}; it must be a file, or be taken out of the folder.")


def checked_name(name: str, where: str) -> str:
    """Return a path that a file gives for one of its neighbours, after checking that it stays inside the folder.

    Args:
        name: The path, as it was read from a file.
        where: The file that it was read from, for messages.

    Raises:
        GdnError: The path leads out of the folder.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or ("\\" in name and os.sep == "\\"):
        raise GdnError(f"{where} names a file {name[:80]!r}; it must be inside its folder.")
    return name
