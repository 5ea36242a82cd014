"""Port a checkpoint to another format, and back; the command line calls these functions."""

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
from .back import Record, plan_back
from .beside import find_beside
from .dequantise import Dequantising
from .families import family_named
from .lora import CONFIG, PREFIX
from .orbax import leaf, metadata
from .output import Shard, shards
from .plan import Plan, plan_port
from .provenance import open_port
from .reader import Checkpoint, read_json
from .run import SLAB, Progress, Refused, Session, checksum, session
from .source import read
from .stream import stream
from .targets import FAMILY_TARGETS, ROOTS
from .targets.family import target_config

__all__ = ["Outcome", "back", "digests_back", "plan_of", "port"]

SHARD = 5 * 10**9


@dataclass
class Outcome:
    """The outcome of writing a port, or of writing its original again.

    Attributes:
        out: The folder that was written.
        files: The names of the files with tensors.
        tensors: The number of tensors.
        nbytes: The size of all files, in bytes.
        resumed: The number of files that an earlier, interrupted attempt had finished.
        changed: The names of tensors whose bytes differ from the original's, by a cast or by training.
        notes: Sentences on what was done without being requested.
        beside: Other files of the source's folder that were copied unchanged.
        edited: Those of the copied files that were changed since the port.
        overflow: For each tensor concerned, the number of elements that a cast made infinite or NaN.
    """

    out: Path
    files: list[str]
    tensors: int
    nbytes: int
    resumed: int = 0
    changed: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    beside: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    overflow: dict[str, int] = field(default_factory=dict)


def _quiet(what: str, done: int, of: int) -> None:
    pass


def plan_of(
    source: str | Path,
    to: str,
    *,
    family: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    base: str | Path | None = None,
    dequantise: bool = False,
    out: str | Path | None = None,
) -> Plan:
    """Return the plan of what a port would write; only the headers of the source's files are read.

    The arguments are those of ``port``.

    Raises:
        GdnError: The source cannot be read, or the target cannot hold it.
    """
    source = Path(source)
    base, out = (None if path is None else Path(path) for path in (base, out))
    _no_port(source)
    config = None if base is None else read_json(base / "config.json" if base.is_dir() else base)
    plan = plan_port(
        read(Checkpoint(source), family, config, (dtype or "bfloat16") if dequantise else ""), to, dtype, layout
    )
    moved = {"config.json"} if plan.foreign else {"commit_success.txt"} if to in ROOTS else set()
    if plan.own_adapter_config:
        moved.add(CONFIG)
    plan.beside, plan.left = find_beside(plan.read.checkpoint, out, moved)
    return plan


def _no_port(source: Path) -> None:
    """Refuse a source that is itself a port in a tree of parameters, which cannot be ported again.

    Raises:
        GdnError: It is one.
    """
    if source.is_dir() and provenance.is_port(source):
        facts = provenance.load(source)
        if facts["target"] not in FAMILY_TARGETS:
            raise GdnError(
                f"{source} is a port to {facts['target']} of {facts['source']['path']}; port that again, or what "
                f"`portable-gdn port {source} OUT --back` writes."
            )


def port(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    family: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    base: str | Path | None = None,
    dequantise: bool = False,
    shard_size: int = SHARD,
    allow_overflow: bool = False,
    progress: Progress = _quiet,
) -> Outcome:
    """Write a checkpoint in another format, as a new folder that appears only once all files are verified.

    Args:
        source: The checkpoint, a folder with safetensors files or a single such file.
        out: The folder to write, which must not exist.
        to: The name of the target format, such as "jax".
        family: The model family whose names and layouts the source has; None recognises it.
        dtype: The dtype that weights are cast to: "bfloat16", "float32" or "float16"; None casts nothing.
        layout: The layout of MaxText's layers, required for the target "maxtext".
        base: For a LoRA adapter, the base model: its folder or its config.json.
        dequantise: Whether to turn quantised weights into ``dtype``, or bfloat16 if it is None, with their scales.
        shard_size: The largest size of a file, in bytes.
        allow_overflow: Whether a cast may make finite values infinite.
        progress: Called with the name of the current item, the bytes done and the bytes in total.

    Raises:
        GdnError: The source cannot be read, the target cannot hold it, a cast to ``dtype`` makes finite values infinite
            (unless ``allow_overflow``), ``out`` exists, or the disk is full.
    """
    plan = plan_of(source, to, family=family, dtype=dtype, layout=layout, base=base, dequantise=dequantise, out=out)
    return write(plan, Path(out), shard_size, progress, allow_overflow)


def write(
    plan: Plan, out: Path, shard_size: int = SHARD, progress: Progress = _quiet, allow_overflow: bool = False
) -> Outcome:
    """Carry out a plan; see ``port``."""
    if isinstance(plan.read.checkpoint, Dequantising):
        plan.read.checkpoint.check_scales()
        plan.read.checkpoint.scratch = out.absolute().parent
    root = ROOTS.get(plan.target)
    files = shards(plan.outputs, "model", shard_size) if root is None else [leaf(o, root) for o in plan.outputs]
    side = shards(plan.side, "side", shard_size)
    total = sum(shard.nbytes for shard in (*files, *side)) + sum(file.size for file in plan.beside)
    source = plan.read.checkpoint
    with session(out, f"{plan.fingerprint()} {shard_size}", total, progress) as current:
        current.write([*files, *side], source, _dequantising(plan, current.overflow))
        if current.overflow and not allow_overflow:
            raise Refused(_overflow_sentence(current.overflow))
        if root is None:
            _index(current, files)
        else:
            empty = ["opt_state"] if plan.target == "maxtext" else []
            for name, content in metadata(plan.outputs, root, empty).items():
                current.text(name, content)
        beside = {file.name: current.copy(file.place, file.path) for file in plan.beside}
        names = [] if root is not None else [shard.name for shard in files]
        text, kept = provenance.write(
            plan, current.checksums, current.hashes, names, [shard.name for shard in side], beside
        )
        current.text(provenance.FILE, text)
        for name, data in kept.items():
            current.text(f"{provenance.SOURCE}/{name}", data)
        if plan.foreign:
            current.text("config.json", json.dumps(_config(plan), indent=2))
        elif plan.own_adapter_config:
            current.text(CONFIG, json.dumps(_adapter_config(plan), indent=2))
    names = [shard.name for shard in (*files, *side)]
    count = len(plan.outputs) + len(plan.side)
    carried = [file.name for file in plan.beside]
    notes = (*plan.notes, _overflow_note(current.overflow)) if current.overflow else plan.notes
    return Outcome(
        out, names, count, total, current.resumed, list(plan.casts), notes, carried, overflow=dict(current.overflow)
    )


def _counted(overflow: dict[str, int]) -> str:
    first = [f"{name} ({count})" for name, count in list(overflow.items())[:8]]
    return ", ".join(first) + (f" and {len(overflow) - 8} more tensors" if len(overflow) > 8 else "")


def _overflow_sentence(overflow: dict[str, int]) -> str:
    return (
        f"{sum(overflow.values())} elements of the source are finite and would not be so any more, in "
        f"{_counted(overflow)}; "
        f"the dtype must have a larger range (as bfloat16 and float32 have), scales must be finite, or "
        f"--allow-overflow must be given. Nothing was kept."
    )


def _overflow_note(overflow: dict[str, int]) -> str:
    return f"the cast made finite elements infinite or NaN: {_counted(overflow)}"


def _config(plan: Plan) -> dict[str, Any]:
    family, mixer = family_named(plan.settings["family"]), plan.read.mixer
    assert family is not None
    assert mixer is not None
    return target_config(family, mixer, plan.read.sizes, plan.read.linear_layers)


def _adapter_config(plan: Plan) -> dict[str, Any]:
    """Return the adapter's configuration for the target's modules."""
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


def _dequantising(plan: Plan, overflow: dict[str, int]) -> Callable[[str], np.ndarray] | None:
    """Return a function that gives tensors by name with their block scales applied, if the plan needs one.

    The function counts elements that become non-finite.

    Raises:
        GdnError: A scale is zero or negative although the weights to which it belongs are not zero.
    """
    if isinstance(plan.read.checkpoint, Dequantising):
        return plan.read.checkpoint.array
    if not plan.dequantised:
        return None
    source, block = plan.read.checkpoint, plan.read.block
    last: dict[str, np.ndarray] = {}

    def array(name: str) -> np.ndarray:
        if name not in plan.dequantised:
            return source.array(name)
        if name not in last:
            last.clear()  # only one is kept, because the pieces of a tensor are requested one after the other
            weight, scale = source.array(name), source.array(plan.dequantised[name])
            last[name] = dequantise(weight, scale, block or 1)
            count = count_unfinite(last[name], weight)
            if count:
                overflow[name] = count
            wrong = np.count_nonzero(scale.astype(np.float32) <= 0)
            if wrong and np.count_nonzero(last[name]) < np.count_nonzero(weight.astype(np.float32)):
                raise GdnError(
                    f"{plan.dequantised[name]} has {wrong} scales that are not positive, of weights that are not zero; "
                    f"they must be positive."
                )
        return last[name]

    return array


def count_unfinite(made: np.ndarray, source: np.ndarray) -> int:
    """Return how many elements are not finite, beyond those of the source."""
    bad = made.size - int(np.count_nonzero(np.isfinite(made)))
    return bad - (source.size - int(np.count_nonzero(np.isfinite(source.astype(np.float32))))) if bad else 0


def dequantise(weight: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """Return a weight [..., out, in] times the scale of each block of ``block`` x ``block`` elements, in float32."""
    out = weight.astype(np.float32)
    for row in range(scale.shape[-2]):
        rows = slice(row * block, (row + 1) * block)
        factor = np.repeat(scale[..., row, :].astype(np.float32), block, axis=-1)[..., None, : out.shape[-1]]
        with np.errstate(over="ignore", invalid="ignore"):  # the caller counts non-finite elements
            out[..., rows, :] *= factor
    return out


def back(
    folder: str | Path,
    out: str | Path,
    *,
    lossy: bool = False,
    allow_overflow: bool = False,
    progress: Progress = _quiet,
    dry_run: bool = False,
) -> Outcome:
    """Write the original checkpoint of a port again, byte for byte unless the port was changed since.

    Args:
        folder: The port.
        out: The folder to write, which must not exist.
        lossy: Whether to cast tensors back that the port has in a smaller dtype, which does not restore their bytes.
        allow_overflow: Whether a cast back may make finite values infinite.
        progress: Called with the name of the current item, the bytes done and the bytes in total.
        dry_run: Whether to write nothing and only return what would be written.

    Raises:
        GdnError: ``folder`` is not a complete port, a cast lost bytes and ``lossy`` is not given, a cast back makes
            finite values infinite (unless ``allow_overflow``), or a reason given in ``port``.
    """
    folder, out = Path(folder), Path(out)
    record, facts = provenance.read_record(folder)
    _not_dequantised(folder, facts)
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
    beside = provenance.files_beside(folder, facts)
    total = sum(shard.nbytes for shard in files)
    total += sum(path.stat().st_size for path, _ in (beside or {}).values())
    names = [shard.name for shard in files]
    if dry_run:
        return Outcome(out, names, len(outputs), total, changed=lost, beside=list(beside or ()))
    before: dict[str, Any] = facts["tensors"]
    _joined_as_written(record, whole, before)
    expected: dict[str, str] = facts["source"]["tensors"]
    with session(out, f"back {folder.absolute()} {_stamp(whole)}", total, progress, exact=True) as current:
        current.write(files, whole)
        if current.overflow and not allow_overflow:
            raise Refused(_overflow_sentence(current.overflow))
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
        if beside is None:
            beside = {path.name: (path, "") for path in provenance.small_files(folder)}
            own = folder / provenance.SOURCE / "config.json"
            if own.is_file():
                beside["config.json"] = (own, "")
        edited = []
        for name, (path, was) in beside.items():
            if current.copy(name, path) != was and was:
                edited.append(name)
    return Outcome(out, names, len(outputs), total, current.resumed, changed, beside=list(beside), edited=edited)


def _joined_as_written(record: Record, whole: Checkpoint, before: dict[str, Any]) -> None:
    """Check that joined factors are unchanged, because trained ones cannot be taken apart.

    Raises:
        GdnError: They were changed.
    """
    for name in record.settings.get("joined", ()):
        if checksum(whole.chunks(name)) != before.get(name):
            raise GdnError(
                f"{name} joins the factors of several parts and was changed since it was written; it cannot be taken "
                f"apart again, so only an unchanged one goes back."
            )


def _not_dequantised(folder: Path, facts: dict[str, Any]) -> None:
    """Check that a port was not dequantised, because its source's numbers cannot be restored.

    Raises:
        GdnError: It was.
    """
    few = facts.get("quantised") or {}
    if few:
        name, made = next(iter(few.items()))
        raise GdnError(
            f"{folder} was ported with --dequantise: {name} was in {made['scheme']}, and {len(few) - 1} more in few "
            f"bits, which cannot be had back from it; what they were is in the source, {facts['source']['path']}."
        )


def digests_back(
    folder: Path, progress: Progress = _quiet
) -> tuple[dict[str, str], dict[str, str], set[str], set[str]]:
    """Compute what the way back would write, without writing it.

    Returns:
        The SHA-256 of every tensor when it was ported; the SHA-256 of every tensor now; the names of tensors that were
        cast on request; the names of tensors whose dtype in the port is not the one that it should be.

    Raises:
        GdnError: A reason given in ``back``.
    """
    record, facts = provenance.read_record(folder)
    _not_dequantised(folder, facts)
    whole = open_port(folder, facts)
    outputs, lost = plan_back(record, whole, lossy=True)
    _joined_as_written(record, whole, facts["tensors"])
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
