"""What lies in a checkpoint's folder beside its tensors: carried as bytes, never read as anything else, and given back.

Configuration, tokenizer, licence and the like lie in the port where they lay in the source, so that other programs find
them. Everything else (files in folders, programs, pickles, safetensors files that the index does not name) waits under
``source/files``, where nothing looks for it. A repository's own ``.git`` is left where it is, and so are ports.
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
_LARGEST = 64 * 2**20  # bytes of a file that lies in the port where it lay in the source
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Beside:
    """A file of the source's folder. name: its path in there, with "/"; place: its path in the port."""

    name: str
    path: Path
    size: int
    place: str

    @property
    def note(self) -> str:
        """What should be said of it, if anything."""
        if self.name.endswith(".safetensors"):
            return f"{self.name} belongs to no tensor that is ported; it is carried as it is, and --back returns it"
        if self.name.endswith(_PICKLES):
            return f"{self.name} may be a pickle, which is never read; it is carried as it is, and --back returns it"
        return ""


def small(path: Path) -> bool:
    """Whether a file is configuration, tokenizer or licence, and no index."""
    known = path.suffix in _KNOWN or path.name.upper().startswith(("LICENSE", "NOTICE"))
    ours = path.name == FILE or path.name.endswith(INDEX_SUFFIX)
    return known and not ours and path.is_file() and path.stat().st_size <= _LARGEST


def find_beside(
    checkpoint: Checkpoint, out: Path | None, moved: Collection[str] = ()
) -> tuple[list[Beside], tuple[str, ...]]:
    """The files to carry, and sentences on what is left behind.

    Args:
        checkpoint: the source. Where a file of it was named and not its folder, only small files are carried.
        out: the folder to write, which may lie in the source's.
        moved: names of small files in place of which the port has its own.

    Raises:
        GdnError: something is no file, or a link to nothing.
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
    """A path in a folder that a file says of itself, if it does not lead out of it.

    Raises:
        GdnError: it does.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or ("\\" in name and os.sep == "\\"):
        raise GdnError(f"{where} names a file {name[:80]!r}; it must be inside its folder.")
    return name
