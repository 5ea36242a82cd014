"""The record that a port keeps: where it comes from, where each tensor went, and everything the way back needs.

``portable_gdn.json`` has the names and hashes. The headers of the source's files are stored unchanged in ``source/``,
so that the way back can write identical files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..spec.errors import GdnError, bad
from .back import Record
from .beside import FILE, SOURCE, checked_name, small
from .dequantise import Dequantising
from .header import parse_header, parse_name
from .orbax import Leaves
from .plan import Plan
from .reader import Checkpoint, read_json
from .source import linear_layers
from .table import Spec
from .targets import ROOTS

__all__ = [
    "FILE",
    "FORMAT",
    "SOURCE",
    "files_beside",
    "is_port",
    "load",
    "open_port",
    "read_record",
    "small_files",
    "source_config",
    "write",
]

FORMAT = "portable-gdn-port"
VERSION = 1


def small_files(folder: Path) -> list[Path]:
    """Return configuration, tokenizer and licence files; never programs, weights or an index."""
    return [path for path in sorted(folder.iterdir()) if small(path)]


def write(
    plan: Plan,
    checksums: dict[str, str],
    hashes: dict[str, str],
    files: list[str],
    side: list[str],
    beside: dict[str, str] | None = None,
) -> tuple[str, dict[str, bytes]]:
    """Return the JSON and the files under ``source/`` by name; ``beside`` has the SHA-256 of unchanged copies."""
    source = plan.read
    family = source.family
    from .. import __version__

    mixer = source.mixer
    few = source.checkpoint if isinstance(source.checkpoint, Dequantising) else None
    quantised, left_out = (few.quantised, few.left_out) if few is not None else ({}, {})
    facts: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "portable_gdn": __version__,
        "target": plan.target,
        "settings": plan.settings,
        "family": family.name,
        "prefix": source.dialect.prefix,
        "sizes": source.sizes,
        "block": source.block,
        "linear_layers": list(linear_layers(source.checkpoint.config)) if source.adapter else source.linear_layers,
        "mixer": None if mixer is None else mixer.as_dict(),
        "zero_centred_norms": list(family.zero_centred),
        "notes": list(plan.notes),
        "adapter": {name: {"rank": rank, "scaling": plan.scalings.get(name)} for name, rank in plan.ranks.items()},
        "files": files,
        "leaves": {o.name: [o.spec.dtype, list(o.spec.shape)] for o in plan.outputs} if plan.target in ROOTS else {},
        "side_files": side,
        "carried": {rule: list(names) for rule, names, _ in source.carried},
        "aside": {group.rule: list(group.names) for group in plan.skipped},
        "casts": {name: list(pair) for name, pair in plan.casts.items()},
        "dequantised": plan.dequantised,
        "quantised": {name: made.as_dict() for name, made in quantised.items()},
        "left_out": left_out,
        "tensors": {
            output.name: checksums[output.name] for output in (*plan.outputs, *plan.side) if output.name in checksums
        },
        "source": {
            "path": str(source.checkpoint.path.absolute()),
            "index": source.checkpoint.index,
            "files": {name: path.stat().st_size for name, path in source.checkpoint.files.items()},
            "tensors": hashes,
            "beside": {
                file.name: {"place": file.place, "size": file.size, "sha256": (beside or {})[file.name]}
                for file in plan.beside
            },
        },
    }
    kept = {name + ".header": header.raw for name, header in source.checkpoint.headers.items()}
    if source.checkpoint.index is not None:
        kept[source.checkpoint.index] = (source.checkpoint.folder / source.checkpoint.index).read_bytes()
    return json.dumps(facts, indent=1), kept


def is_port(folder: Path) -> bool:
    """Whether a folder holds a port."""
    return (folder / FILE).is_file()


def load(folder: Path) -> dict[str, Any]:
    """Return the JSON of a port.

    Raises:
        GdnError: There is none, or it is not that of a port.
    """
    if not is_port(folder):
        raise bad(str(folder), "a folder without " + FILE, "be what `portable-gdn port` wrote")
    facts = read_json(folder / FILE)
    if facts.get("format") != FORMAT or facts.get("version") != VERSION:
        raise bad(
            str(folder / FILE), f"of format {facts.get('format')} {facts.get('version')}", f"be {FORMAT} {VERSION}"
        )
    return facts


def source_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a port's source, empty if it had none."""
    for path in (folder / SOURCE / "config.json", folder / "config.json"):
        if path.is_file():
            return read_json(path)
    return {}


def open_port(folder: Path, facts: dict[str, Any], side: bool = True) -> Checkpoint:
    """Open the tensors of a port, whatever files hold them.

    Raises:
        GdnError: The port is not complete, or its files are not consistent.
    """
    root, beside = ROOTS.get(facts["target"]), facts["side_files"] if side else []
    for name in (*facts["files"], *beside):
        if name != Path(name).name:
            raise bad(FILE, f"naming a file {name[:80]!r}", "name files without folders")
    if root is None:
        return Checkpoint(folder, [*facts["files"], *beside])
    specs = {name: Spec(dtype, tuple(shape)) for name, (dtype, shape) in facts["leaves"].items()}
    for name in specs:
        parse_name(folder / FILE, name)
    return Leaves(folder, root, beside, specs)


def files_beside(folder: Path, facts: dict[str, Any]) -> dict[str, tuple[Path, str]] | None:
    """Return the files that a port copied unchanged, by their names in the source: the path and SHA-256 of each.

    None means that an older version made the port and did not record them.

    Raises:
        GdnError: A file is missing, or outside the folder.
    """
    listed = facts["source"].get("beside")
    if listed is None:
        return None
    found = {}
    if not isinstance(listed, dict) or not all(
        isinstance(file, dict) and isinstance(file.get("place"), str) and isinstance(file.get("sha256"), str)
        for file in listed.values()
    ):
        raise bad(str(folder / FILE), "not whole (its source.beside)", "be as it was written")
    for name, file in listed.items():
        path = folder / checked_name(file["place"], FILE)
        if not path.is_file():
            raise GdnError(f"{path} is not there, which is {name} of the source; the port must be whole.")
        found[checked_name(name, FILE)] = (path, file["sha256"])
    return found


def read_record(folder: Path) -> tuple[Record, dict[str, Any]]:
    """Return what the way back needs, after checking it, and the whole JSON.

    Raises:
        GdnError: It is not complete, or names files outside its folder.
    """
    facts = load(folder)
    headers = {}
    try:
        for name, size in facts["source"]["files"].items():
            if name != Path(name).name or not name.endswith(".safetensors"):
                raise bad(FILE, f"naming a source file {name[:80]!r}", "name safetensors files without folders")
            path = folder / SOURCE / (name + ".header")
            headers[name] = parse_header(path, path.read_bytes(), size)
        return Record(
            target=facts["target"],
            family=facts["family"],
            prefix=facts["prefix"],
            sizes=dict(facts["sizes"]),
            block=facts["block"],
            headers=headers,
            carried={rule: tuple(names) for rule, names in (*facts["carried"].items(), *facts["aside"].items())},
            dequantised=dict(facts["dequantised"]),
            settings=dict(facts["settings"]),
            linear_layers=tuple(facts["linear_layers"]),
        ), facts
    except OSError as error:
        raise GdnError(f"{error.filename} cannot be read: {error.strerror}; the port must be whole.") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, GdnError):
            raise
        raise bad(str(folder / FILE), f"not whole ({type(error).__name__}: {error})", "be as it was written") from error
