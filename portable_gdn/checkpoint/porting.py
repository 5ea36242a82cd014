"""Port a checkpoint, and go back: what the command line calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import GdnError
from . import provenance
from .adapters import target_settings
from .back import plan_back
from .families import family_named
from .lora import CONFIG, PREFIX
from .orbax import leaf, metadata
from .output import Shard, shards
from .plan import Plan, plan_port
from .provenance import open_port
from .reader import Checkpoint, read_json
from .run import SLAB, Progress, Session, checksum, session
from .source import read
from .stream import stream
from .targets import ROOTS
from .targets.family import target_config

__all__ = ["Outcome", "back", "digests_back", "plan_of", "port"]

SHARD = 5 * 10**9


@dataclass
class Outcome:
    """What was written. changed: tensors that differ from the original's bytes (by a cast, or because they were
    trained)."""

    out: Path
    files: list[str]
    tensors: int
    nbytes: int
    resumed: int = 0
    changed: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def _quiet(what: str, done: int, of: int) -> None:
    pass


def plan_of(
    source: Path,
    to: str,
    *,
    family: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    base: Path | None = None,
) -> Plan:
    """What a port would write, from headers alone.

    Raises:
        GdnError: the source cannot be read or the target cannot hold it.
    """
    config = None if base is None else read_json(base / "config.json" if base.is_dir() else base)
    return plan_port(read(Checkpoint(source), family, config), to, dtype, layout)


def port(
    source: Path,
    out: Path,
    to: str,
    *,
    family: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    base: Path | None = None,
    shard_size: int = SHARD,
    progress: Progress = _quiet,
) -> Outcome:
    """Write ``source`` in another format, as the new folder ``out``; nothing is there before all of it is right.

    Raises:
        GdnError: the source cannot be read, the target cannot hold it, ``out`` exists, or the disk is full.
    """
    plan = plan_of(source, to, family=family, dtype=dtype, layout=layout, base=base)
    return write(plan, out, shard_size, progress)


def write(plan: Plan, out: Path, shard_size: int = SHARD, progress: Progress = _quiet) -> Outcome:
    """Carry out a plan; see ``port``."""
    root = ROOTS.get(plan.target)
    files = shards(plan.outputs, "model", shard_size) if root is None else [leaf(o, root) for o in plan.outputs]
    side = shards(plan.side, "side", shard_size)
    total = sum(shard.nbytes for shard in (*files, *side))
    source = plan.read.checkpoint
    family = plan.settings.get("family")
    foreign = family is not None and (family != plan.read.family.name or plan.read.bare)
    with session(out, f"{plan.fingerprint()} {shard_size}", total, progress) as current:
        current.write([*files, *side], source, _dequantising(plan))
        if root is None:
            _index(current, files)
        else:
            empty = ["opt_state"] if plan.target == "maxtext" else []
            for name, content in metadata(plan.outputs, root, empty).items():
                current.text(name, content)
        names = [] if root is not None else [shard.name for shard in files]
        text, kept = provenance.write(plan, current.checksums, current.hashes, names, [shard.name for shard in side])
        current.text(provenance.FILE, text)
        for name, data in kept.items():
            current.text(f"{provenance.SOURCE}/{name}", data)
        for path in provenance.small_files(source.folder):
            own = (path.name == "config.json" and foreign) or (path.name == CONFIG and family is not None)
            current.text(f"{provenance.SOURCE}/{path.name}" if own else path.name, path.read_bytes())
        if foreign and plan.read.lora is None:
            current.text("config.json", json.dumps(_config(plan), indent=2))
        elif family is not None and plan.read.lora is not None and plan.read.lora.config:
            current.text(CONFIG, json.dumps(_adapter_config(plan), indent=2))
    names = [shard.name for shard in (*files, *side)]
    count = len(plan.outputs) + len(plan.side)
    return Outcome(out, names, count, total, current.resumed, list(plan.casts), plan.read.notes)


def _config(plan: Plan) -> dict[str, Any]:
    family, mixer = family_named(plan.settings["family"]), plan.read.mixer
    assert family is not None
    assert mixer is not None
    return target_config(family, mixer, plan.read.sizes, plan.read.linear_layers)


def _adapter_config(plan: Plan) -> dict[str, Any]:
    """The adapter's configuration for the target's modules."""
    assert plan.read.lora is not None
    own = {name: name.removeprefix(PREFIX).partition(".lora_A")[0] for name in plan.ranks}
    ranks = {own[name]: rank for name, rank in plan.ranks.items()}
    return target_settings(plan.read.lora.config, ranks, {own[name]: s for name, s in plan.scalings.items()})


def _index(current: Session, files: list[Shard]) -> None:
    where = {output.name: shard.name for shard in files for output in shard.outputs}
    size = sum(output.nbytes for shard in files for output in shard.outputs)
    current.text(
        "model.safetensors.index.json", json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1)
    )


def _dequantising(plan: Plan) -> Callable[[str], np.ndarray] | None:
    """Tensors by name with their block scales applied, where the plan says so."""
    if not plan.dequantised:
        return None
    source, block = plan.read.checkpoint, plan.read.block
    last: dict[str, np.ndarray] = {}

    def array(name: str) -> np.ndarray:
        if name not in plan.dequantised:
            return source.array(name)
        if name not in last:
            last.clear()  # one at a time: its pieces are asked for one after the other
            last[name] = dequantise(source.array(name), source.array(plan.dequantised[name]), block or 1)
        return last[name]

    return array


def dequantise(weight: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """A weight [..., out, in] times the scale of each block x block elements, in float32."""
    out = weight.astype(np.float32)
    for row in range(scale.shape[-2]):
        rows = slice(row * block, (row + 1) * block)
        factor = np.repeat(scale[..., row, :].astype(np.float32), block, axis=-1)[..., None, : out.shape[-1]]
        out[..., rows, :] *= factor
    return out


def back(
    folder: Path, out: Path, *, lossy: bool = False, progress: Progress = _quiet, dry_run: bool = False
) -> Outcome:
    """Write what a port was made of, as the new folder ``out``: the very files, if nothing was changed since.

    Raises:
        GdnError: ``folder`` is no port or not whole, a cast lost bytes and ``lossy`` is not given, or as in ``port``.
    """
    record, facts = provenance.read_record(folder)
    whole = open_port(folder, facts)
    outputs, lost = plan_back(record, whole, lossy)
    by_name = {output.name: output for output in outputs}
    for name in lost:
        if name not in by_name:
            raise GdnError(
                f"{name} was in eight bits and its scales were applied; only a port that carries them goes back."
            )
    files = [
        Shard(name, header.raw, tuple(by_name[n] for n in header.tensors)) for name, header in record.headers.items()
    ]
    total = sum(shard.nbytes for shard in files)
    names = [shard.name for shard in files]
    if dry_run:
        return Outcome(out, names, len(outputs), total, changed=lost)
    before: dict[str, Any] = facts["tensors"]
    for name in record.settings.get("joined", ()):
        if checksum(whole.chunks(name)) != before.get(name):
            raise GdnError(
                f"{name} joins the factors of several parts and was changed since it was written; it cannot be taken "
                f"apart again, so only an unchanged one goes back."
            )
    expected: dict[str, str] = facts["source"]["tensors"]
    with session(out, f"back {folder.absolute()} {_stamp(whole)}", total, progress, exact=True) as current:
        current.write(files, whole)
        changed = []
        for output in outputs:
            if current.hashes[output.name] == expected.get(output.name):
                continue
            untouched = all(checksum(whole.chunks(n)) == before.get(n) for n in output.sources)
            if untouched and not output.cast:
                raise GdnError(
                    f"{output.name} did not come back as it was though nothing was changed; this must not happen."
                )
            changed.append(output.name)
        index = facts["source"]["index"]
        if index is not None:
            current.text(Path(index).name, (folder / provenance.SOURCE / Path(index).name).read_bytes())
        for path in provenance.small_files(folder):
            own = folder / provenance.SOURCE / path.name
            current.text(path.name, (own if own.is_file() else path).read_bytes())
    return Outcome(out, names, len(outputs), total, current.resumed, changed)


def digests_back(
    folder: Path, progress: Progress = _quiet
) -> tuple[dict[str, str], dict[str, str], set[str], set[str]]:
    """What the way back would give, without writing it.

    Returns:
        SHA-256 of every tensor when it was ported; of every tensor now; the names of those that were cast because it
        was asked for; the names of those whose dtype is another in the port and should not be.

    Raises:
        GdnError: as ``back``.
    """
    record, facts = provenance.read_record(folder)
    whole = open_port(folder, facts)
    outputs, lost = plan_back(record, whole, lossy=True)
    asked = facts["casts"]
    recast = {o.name for o in outputs if o.cast and not any(name in asked for name in o.sources)}
    cast = {*lost, *(o.name for o in outputs if o.cast)} - recast
    states: dict[str, Any] = {}
    for output, data in stream(outputs, whole, SLAB):
        if output.name not in states:
            states[output.name] = hashlib.sha256()
            progress(output.name, len(states), len(outputs))
        states[output.name].update(data)
    found = {name: state.hexdigest() for name, state in states.items()}
    return dict(facts["source"]["tensors"]), found, cast, recast


def _stamp(checkpoint: Checkpoint) -> str:
    return json.dumps([[n, p.stat().st_size, p.stat().st_mtime_ns] for n, p in checkpoint.files.items()])
