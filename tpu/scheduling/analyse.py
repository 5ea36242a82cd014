"""From the files of a compiled program to its report. It does not import jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..chips import Chip
from ..slices import Slice
from .collectives import collectives, kind_of
from .dump import UNITS, Block, Dump, Files
from .hlo import Moved, Operation, moves, parse
from .machine import Loop, Run, run
from .report import PARTS, LoopReport, OperationReport, Schedule

__all__ = ["analyse"]

#: Operations that only wait for, or name, what others do.
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "copy-done")


def analyse(
    folder: Path,
    chip: Chip,
    grids: Mapping[str, list[list[int]]],
    values: Mapping[int, Any],
    memory: Mapping[str, int],
    versions: Mapping[str, str],
    compiled: str,
    where: Slice | None = None,
) -> Schedule:
    """The report of the one program that was compiled into ``folder``.

    Args:
        folder: what the compiler wrote.
        grids: of Pallas calls, by name; a name may have been given to several.
        values: integers of those arguments of the program whose values are known, by number.
        memory, versions: handed through.
        compiled: the text of the executable, which knows the VMEM of each operation.
        where: the slice that it was compiled for, if for more than one device.
    """
    dump = Dump(folder)
    module = parse(dump.hlo, values)
    times = dump.times()
    vmem = {operation.name: operation.vmem for operation in parse(compiled).operations}
    moved, left = moves(module)
    kernels: list[Any] = []
    others: list[Any] = []
    for operation in module.operations:
        if operation.opcode in _NOTHING or kind_of(operation.opcode.removesuffix("-done")) is not None:
            continue
        files = dump.files(operation.name)
        if files is None:
            continue
        known = {place: v for (name, place), v in module.constants.items() if name == operation.name}
        found = run(files.bundles, known)
        grid = _grid(found, grids.get(_call(operation.source), []), chip.cores) if operation.kernel else None
        operation = operation._replace(vmem=vmem.get(operation.name, 0), source=_source(operation.source))
        beside = moved.get(operation.name, Moved(0, 0))
        report = _operation(operation, files, chip, found, grid, times.get(operation.name), beside)
        (kernels if operation.kernel else others).append(report)
    named = {operation.name: operation for operation in module.operations}
    for name, bytes_ in left.items():
        beside_it = [o.name for o in module.operations if o.computation == named[name].computation and o.name in times]
        others.append(_transfer(named[name], bytes_, times[beside_it[0]] if beside_it else 1))
    sent = () if where is None else tuple(collectives(dump.hlo, module, times, where.devices))
    shape = () if where is None else where.shape
    return Schedule(chip.name, tuple(kernels), tuple(others), dict(memory), dict(versions), sent, shape)


def _call(source: str) -> str:
    """The name that a Pallas call was given, from the path of the traced operation."""
    parts = source.split("/")
    return parts[-2] if len(parts) > 1 and parts[-1] == "pallas_call" else parts[-1]


def _source(source: str) -> str:
    """The path of a traced operation from the caller's function on: what is before it is how it was handed over."""
    before, found, path = source.rpartition("jit(flat)/")
    return path if found else before or source


def _grid(found: Run, grids: list[list[int]], cores: int) -> list[int] | None:
    """The grid of a kernel: of those that calls of its name have, the one whose steps it takes."""
    different = [grid for i, grid in enumerate(grids) if grid not in grids[:i]]
    if len(different) > 1:
        different = [grid for grid in different if _all_steps(found, grid, cores) is not None]
    return different[0] if len(different) == 1 else None


def _transfer(start: Operation, moved: Moved, times: int | None) -> OperationReport:
    """A copy that is seen to serve no one operation, as a row of its own."""
    return OperationReport(
        start.name, start.opcode, _source(start.source), False, times, 0, 0, None, None, None, 0, {}, {}, 0, 0, 0, {},
        (), 0, 0, moved.bytes, (), moved.bytes, moved.across,
    )  # fmt: skip


def _operation(
    operation: Operation,
    files: Files,
    chip: Chip,
    found: Run,
    grid: list[int] | None,
    times: int | None,
    beside: Moved,
) -> OperationReport:
    whole = _all_steps(found, grid, chip.cores) if grid is not None else None
    steps = _steps(found, grid, chip.cores)
    per_step = _per_step(found, steps)
    named = dict(zip(UNITS, files.units.T, strict=True))
    spills, fills = (int((per_step * named[unit]).sum()) for unit in ("VSTORE:SPILL", "VLOAD:FILL"))
    resident = sum(a.bytes for a in (*operation.operands, *operation.results) if a.memory == "vmem")
    unknown_turns = any(loop.turns is None for loop in found.loops)
    cycles = int(found.counts.sum())
    copied, perhaps = _hbm(found, chip)
    return OperationReport(
        name=operation.name,
        opcode=operation.opcode,
        source=operation.source,
        kernel=operation.kernel,
        times=times,
        cycles=None if unknown_turns or not found.complete else cycles,
        least_cycles=None if unknown_turns or not found.complete else int(found.least.sum()),
        grid=None if grid is None else tuple(grid),
        steps=steps,
        bundles_per_step=int(per_step.sum()) if steps else None,
        code_bundles=len(files.bundles),
        units=_units(found.counts, named, files, chip),
        parts=_parts(found.counts, files),
        spills=spills,
        fills=fills,
        critical_path=_critical_path(files, per_step),
        stages=files.stages,
        loops=tuple(_loop(loop, found, files) for loop in found.loops),
        vmem_bytes=operation.vmem,
        resident_bytes=resident if operation.kernel else 0,
        hbm_bytes=None if unknown_turns else copied + beside.bytes,
        notes=tuple(_notes(found, perhaps)),
        beside_bytes=beside.bytes,
        across_bytes=beside.across,
        grid_steps=whole,
        timeline=_timeline(per_step, named, files) if operation.kernel else None,
    )


def _notes(found: Run, perhaps: int) -> list[str]:
    notes = []
    if not found.complete:
        notes.append("it runs too long to be followed here: totals are unknown, and figures are those of a part")
    elif any(loop.turns is None for loop in found.loops):
        notes.append("a loop's number of turns depends on values: figures count one turn of it")
    elif not found.exact:
        notes.append(
            f"whether some of it runs depends on values: at least {int(found.least.sum()):,} cycles, "
            f"at most {int(found.counts.sum()):,}, and the figures are those of the most"
        )
    if perhaps:
        notes.append(f"{perhaps} of its copies depend on values and are not among the HBM bytes")
    return notes


def _grid_loop(found: Run) -> Loop | None:
    outer = [loop for loop in found.loops if loop.level == 1]
    return max(outer, key=lambda loop: int(found.counts[loop.begin : loop.end].sum()), default=None)


def _all_steps(found: Run, grid: list[int], cores: int) -> int | None:
    """Grid steps of this core. The pipeline's loop takes turns more, in which only copies run."""
    number = math.prod(grid)
    shares = [-(-number // share) for share in range(1, cores + 1)]
    counts = set(found.counts.tolist())
    return next((n for n in shares if n in counts), None if _grid_loop(found) else 1)


def _steps(found: Run, grid: list[int] | None, cores: int) -> int | None:
    """Grid steps of this core in which most of the code runs: all, unless the kernel passes some over."""
    loop = _grid_loop(found)
    whole = None if grid is None else _all_steps(found, grid, cores)
    if loop is None or loop.turns is None or (grid is not None and whole is None):
        return whole
    counts = found.counts[loop.begin : loop.end]
    values, weights = np.unique(counts, return_counts=True)
    if whole is None:
        return int(values[weights.argmax()]) or None
    cycles = values * weights
    most = int(values[cycles.argmax()])
    skips = whole <= 4 * most < 4 * whole and cycles[values >= whole].sum() < cycles.max()
    return most if skips else whole


def _per_step(found: Run, steps: int | None) -> np.ndarray:
    """How often each bundle runs in a full step; in the whole run where there are no steps.

    What runs in fewer turns than there are steps (a first step's initialisation) is not part of a full step.
    """
    loop = _grid_loop(found)
    if not steps or loop is None:
        return found.counts
    per_step = np.zeros_like(found.counts)
    inside = slice(loop.begin, loop.end)
    per_step[inside] = found.counts[inside] >= steps
    for inner in found.loops:
        if inner.level > 1 and loop.begin <= inner.begin < loop.end:
            part = slice(inner.begin, inner.end)
            per_step[part] = np.where(found.counts[part] >= steps, found.counts[part] // steps, 0)
    return per_step


def _units(counts: np.ndarray, named: Mapping[str, np.ndarray], files: Files, chip: Chip) -> dict[str, float]:
    places = dict(zip(UNITS, files.capacity.tolist(), strict=True))
    slots = {name: float((counts * used).sum()) for name, used in named.items()}
    slots["VLOAD"] -= slots.pop("VLOAD:FILL")
    slots["VSTORE"] -= slots.pop("VSTORE:SPILL")
    cycles = {name: used / max(1, places[name]) for name, used in slots.items()}
    # A matrix unit loads rows of one operand while it multiplies those of another: two things that can bind it.
    pushes = float((counts * np.array([b.pushes for b in files.bundles])).sum())
    return {"MXU": cycles.pop("MXU"), "MXU load": pushes * chip.push_cycles / chip.mxu_count, **cycles}


def _timeline(per_step: np.ndarray, named: Mapping[str, np.ndarray], files: Files) -> dict[str, list[float]]:
    """The share of each unit's slots that is taken, in up to 120 equal parts of a step; idle units are left out."""
    cycles = int(per_step.sum())
    if not cycles:
        return {}
    bins = min(120, cycles)
    places = dict(zip(UNITS, files.capacity.tolist(), strict=True))
    # Where a bundle of a loop runs several times, its turns are drawn as one piece.
    part = np.minimum((np.cumsum(per_step) - per_step) * bins // cycles, bins - 1)
    width = np.bincount(part, per_step, bins)
    found = {}
    for unit, used in named.items():
        if ":" in unit or not (per_step * used).any():
            continue
        shares = np.bincount(part, per_step * used, bins) / np.maximum(1, width * max(1, places[unit]))
        found[unit] = [float(f"{x:.3f}") for x in shares]
    return found


def _parts(counts: np.ndarray, files: Files, inside: slice = slice(None)) -> dict[str, int]:
    used = dict(zip(UNITS, files.units.T > 0, strict=True))
    own = dict(zip(UNITS, files.units.T, strict=True))
    traffic = (own["VLOAD"] > own["VLOAD:FILL"]) | (own["VSTORE"] > own["VSTORE:SPILL"])
    empty = np.array([b.empty for b in files.bundles])
    kinds = {
        "MXU": used["MXU"],
        "XLU": used["XLU"],
        "vector": used["VALU"] | used["EUP"] | used["VPOP"],
        "load/store": traffic,
        "spill": used["VLOAD:FILL"] | used["VSTORE:SPILL"],
        "scalar": ~empty,
        "waiting": empty,
    }
    left = np.ones(len(files.bundles), bool)
    parts = {}
    for part in PARTS:
        here = left & kinds[part]
        parts[part] = int((counts * here)[inside].sum())
        left &= ~here
    return parts


def _loop(loop: Loop, found: Run, files: Files) -> LoopReport:
    inside = slice(loop.begin, loop.end)
    cycles = int(found.counts[inside].sum())
    return LoopReport(loop.level, loop.turns, loop.end - loop.begin, cycles, _parts(found.counts, files, inside))


def _critical_path(files: Files, per_step: np.ndarray) -> int:
    """Sum of the longest chains of the blocks that a full step runs through.

    Blocks are known by region; a region's first bundle tells whether a step runs it.
    """
    begins: dict[int, int] = {}
    for at, bundle in enumerate(files.bundles):
        for region in bundle.regions:
            begins.setdefault(region, at)

    def runs(block: Block) -> int:
        known = [r for r in (block.region, *block.parents) if r in begins]
        return int(per_step[begins[known[0]]]) if known else 0

    return sum(block.length * runs(block) for block in files.blocks)


def _hbm(found: Run, chip: Chip) -> tuple[int, int]:
    """Bytes that copies move to and from HBM for certain, and the number of those that are not certain."""
    through = [c for c in found.copies if "hbm" in (c.source, c.target)]
    both = {c: (c.source == "hbm") + (c.target == "hbm") for c in through}
    unsure = sum(c.number for c in found.copies if "?" in (c.source, c.target) and c not in both)
    perhaps = sum(c.perhaps for c in found.copies if {"hbm", "?"} & {c.source, c.target})
    return sum(c.granules * chip.dma_granule_bytes * both[c] for c in through), perhaps + unsure
