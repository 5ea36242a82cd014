"""From the files of a compiled program to its report. No jax here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..chips import Chip
from .dump import UNITS, Block, Dump, Files
from .hlo import Operation, parse
from .machine import Loop, Run, run
from .report import PARTS, LoopReport, OperationReport, Schedule

__all__ = ["analyse"]

#: Operations that only wait for, or name, what others do.
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "copy-done")


def analyse(
    folder: Path,
    chip: Chip,
    grids: Mapping[str, list[int]],
    values: Mapping[int, Any],
    memory: Mapping[str, int],
    versions: Mapping[str, str],
    compiled: str,
) -> Schedule:
    """The report of the one program that was compiled into ``folder``.

    Args:
        folder: what the compiler wrote.
        grids: of Pallas calls, by name.
        values: integers of those arguments of the program whose values are known, by number.
        memory, versions: handed through.
        compiled: the text of the executable, which knows the VMEM of each operation.
    """
    dump = Dump(folder)
    module = parse(dump.hlo, values)
    times = dump.times()
    vmem = {operation.name: operation.vmem for operation in parse(compiled).operations}
    kernels, others = [], []
    for operation in module.operations:
        if operation.opcode in _NOTHING:
            continue
        files = dump.files(operation.name)
        if files is None:
            continue
        known = {place: v for (name, place), v in module.constants.items() if name == operation.name}
        grid = grids.get(_call(operation.source)) if operation.kernel else None
        operation = operation._replace(vmem=vmem.get(operation.name, 0))
        report = _operation(operation, files, chip, known, grid, times.get(operation.name))
        (kernels if operation.kernel else others).append(report)
    return Schedule(chip.name, tuple(kernels), tuple(others), dict(memory), dict(versions))


def _call(source: str) -> str:
    """The name that a Pallas call was given, from the path of the traced operation."""
    parts = source.split("/")
    return parts[-2] if len(parts) > 1 and parts[-1] == "pallas_call" else parts[-1]


def _operation(
    operation: Operation,
    files: Files,
    chip: Chip,
    known: Mapping[int, np.ndarray],
    grid: list[int] | None,
    times: int | None,
) -> OperationReport:
    found = run(files.bundles, known)
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
        hbm_bytes=None if unknown_turns else copied + (resident if operation.kernel else 0),
        notes=tuple(_notes(found, perhaps)),
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


def _steps(found: Run, grid: list[int] | None, cores: int) -> int | None:
    """Grid steps of this core. The pipeline's loop takes turns more, in which only copies run."""
    loop = _grid_loop(found)
    if grid is not None:
        number = math.prod(grid)
        shares = [-(-number // share) for share in range(1, cores + 1)]
        counts = set(found.counts.tolist())
        return next((n for n in shares if n in counts), None if loop else 1)
    if loop is None or loop.turns is None:
        return None
    values, weights = np.unique(found.counts[loop.begin : loop.end], return_counts=True)
    return int(values[weights.argmax()]) or None


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
    return sum(c.granules * chip.dma_granule_bytes * both[c] for c in through), sum(c.perhaps for c in through)
