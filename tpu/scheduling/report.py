"""The report of a compiled program: records, their sums, and their text. This module does not import jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..chips import Chip, chip_named
from ..slices import Slice
from .collectives import Collective

__all__ = ["PARTS", "LoopReport", "OperationReport", "Schedule"]

#: Cycles are counted for the first of these that has an instruction in the bundle; "waiting" has none.
PARTS = ("MXU", "XLU", "vector", "load/store", "spill", "scalar", "waiting")


class LoopReport(NamedTuple):
    """A loop of the code.

    Attributes:
        level: 1 is the outermost loop, which is the grid of a Pallas kernel.
        turns: The iterations in one run of the operation. If the listing does not show it, this is None and cycles are
            those of one iteration.
        bundles: The bundles of its code.
        cycles: The cycles of all iterations, including inner loops.
        parts: The same cycles by ``PARTS``.
    """

    level: int
    turns: int | None
    bundles: int
    cycles: int
    parts: dict[str, int]


class OperationReport(NamedTuple):
    """One operation of a compiled program: a Pallas kernel or an operation of XLA. Figures are for one run on one core.

    Attributes:
        name, opcode, source: The name in the module, XLA's operation, and the operation of the traced program.
        kernel: Whether it is a Pallas kernel.
        times: The number of times that the program runs it; None if this depends on values.
        cycles: The cycles of one run; None if the iterations of a loop are unknown.
        least_cycles: The cycles without code that may not run.
        grid: The grid of the Pallas call.
        grid_steps: The number of its steps on this core.
        steps: The number of steps that run most of the code, if a kernel skips others.
        bundles_per_step: The cycles of a full step.
        code_bundles: The bundles of the whole listing.
        units: The cycles that each unit would need if it never waited, without spills.
        parts: The cycles by ``PARTS``.
        spills, fills: Vector registers stored and loaded again per step (per run if there are no steps).
        critical_path: The longest chain of dependences in a step, before register allocation.
        stages: The bundles of the code at four points of the compiler, and the empty ones among them.
        vmem_bytes: The VMEM that it was given.
        resident_bytes: The operands and results of a kernel that XLA keeps in VMEM in addition.
        hbm_bytes: The bytes that its own copies move.
        beside_bytes: The bytes that XLA moves between HBM and VMEM for it, by copies that overlap other operations.
        across_bytes: Those of ``beside_bytes`` that are moved while the previous program still runs.
        notes: What a reader must know to trust the figures.
        timeline: The share of each unit's slots in use, in equal parts of a full step (``picture`` draws it).
    """

    name: str
    opcode: str
    source: str
    kernel: bool
    times: int | None
    cycles: int | None
    least_cycles: int | None
    grid: tuple[int, ...] | None
    steps: int | None
    bundles_per_step: int | None
    code_bundles: int
    units: dict[str, float]
    parts: dict[str, int]
    spills: int
    fills: int
    critical_path: int
    stages: dict[str, tuple[int, int]]
    loops: tuple[LoopReport, ...]
    vmem_bytes: int
    resident_bytes: int
    hbm_bytes: int | None
    notes: tuple[str, ...]
    beside_bytes: int = 0
    across_bytes: int = 0
    grid_steps: int | None = None
    timeline: Mapping[str, Sequence[float]] | None = None

    @property
    def busiest(self) -> tuple[str, float]:
        """The busiest unit, and its cycles."""
        return max(self.units.items(), key=lambda item: item[1], default=("", 0.0))

    def compute_seconds(self, chip: Chip) -> float | None:
        """The time of its bundles, in seconds."""
        return None if self.cycles is None else self.cycles / chip.clock_hz

    def memory_seconds(self, chip: Chip) -> float | None:
        """The time of its HBM traffic at the chip's bandwidth, in seconds."""
        return None if self.hbm_bytes is None else self.hbm_bytes / chip.hbm_bytes_per_second

    def seconds(self, chip: Chip) -> float | None:
        """The longer of the two times, because copies overlap the code."""
        times = (self.compute_seconds(chip), self.memory_seconds(chip))
        return None if None in times else max(times)  # type: ignore[type-var]

    def floor_seconds(self, chip: Chip) -> float | None:
        """A lower bound for any schedule of the same work: the busiest unit or the traffic, whichever takes longer."""
        memory = self.memory_seconds(chip)
        return None if memory is None or self.cycles is None else max(memory, self.busiest[1] / chip.clock_hz)

    def bound(self, chip: Chip) -> str:
        """ "compute", "memory" or "unknown"."""
        compute, memory = self.compute_seconds(chip), self.memory_seconds(chip)
        if compute is None or memory is None:
            return "unknown"
        return "memory" if memory > compute else "compute"

    def as_dict(self, chip: Chip) -> dict[str, Any]:
        """Return every field, and the figures that follow from them on a chip, for JSON."""
        cycles = self.cycles or 0
        return {
            **self._asdict(),
            "loops": [loop._asdict() for loop in self.loops],
            "mxu_utilization": self.units.get("MXU", 0.0) / cycles if cycles else None,
            "utilization": {u: c / cycles for u, c in self.units.items()} if cycles else None,
            "bound": self.bound(chip),
            "compute_seconds": self.compute_seconds(chip),
            "memory_seconds": self.memory_seconds(chip),
            "floor_seconds": self.floor_seconds(chip),
            "vmem_of": chip.vmem_bytes,
        }


class Schedule(NamedTuple):
    """A program compiled for a chip, as the compiler scheduled it. ``str()`` of it is the report.

    Attributes:
        kernels: The Pallas kernels; for a program on several devices, those of one device.
        others: The operations that XLA runs around them, likewise.
        collectives: The collectives between devices.
        chips: The number of chips along each axis of the slice; () for one device.
        memory: The bytes of HBM for arguments, results and temporaries, and of donated arguments that results reuse.
        versions: The versions of jax and libtpu.
    """

    chip: str
    kernels: tuple[OperationReport, ...]
    others: tuple[OperationReport, ...]
    memory: dict[str, int]
    versions: dict[str, str]
    collectives: tuple[Collective, ...] = ()
    chips: tuple[int, ...] = ()

    @property
    def where(self) -> Slice | None:
        """The slice that it was compiled for; None for one device."""
        return Slice(chip_named(self.chip), self.chips) if self.chips else None

    @property
    def collective_seconds(self) -> float | None:
        """The time of all collectives, one after the other, over the links between chips."""
        where = self.where
        return 0.0 if where is None else _sum(_times(c.times, c.seconds(where)) for c in self.collectives)

    @property
    def collective_bytes(self) -> float | None:
        """The bytes of all collectives' arrays on one device."""
        return _sum(_times(c.times, c.bytes) for c in self.collectives)

    @property
    def together_seconds(self) -> float | None:
        """Kernels, what runs around them and collectives, one after the other."""
        return _sum(iter((self.seconds, self.other_seconds, self.collective_seconds)))

    @property
    def cycles(self) -> int | None:
        """The cycles of all kernels, each counted as often as it runs."""
        return _sum(_times(k.times, k.cycles) for k in self.kernels)

    @property
    def seconds(self) -> float | None:
        """The time of all kernels, for each the longer of its code and its traffic."""
        chip = chip_named(self.chip)
        return _sum(_times(k.times, k.seconds(chip)) for k in self.kernels)

    @property
    def other_seconds(self) -> float | None:
        """The time of what XLA runs around the kernels."""
        chip = chip_named(self.chip)
        return _sum(_times(k.times, k.seconds(chip)) for k in self.others)

    @property
    def floor_seconds(self) -> float | None:
        """The sum of the kernels' floors."""
        chip = chip_named(self.chip)
        return _sum(_times(k.times, k.floor_seconds(chip)) for k in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        chip, where = chip_named(self.chip), self.where
        return {
            "chip": self.chip,
            "clock_hz": chip.clock_hz,
            "kernels": [k.as_dict(chip) for k in self.kernels],
            "total": {
                "cycles": self.cycles,
                "seconds": self.seconds,
                "floor_seconds": self.floor_seconds,
                "other_seconds": self.other_seconds,
                "collective_seconds": self.collective_seconds,
                "collective_bytes": self.collective_bytes,
            },
            "other_device_ops": [k.as_dict(chip) for k in self.others],
            "chips": self.chips,
            "collectives": [] if where is None else [_sent(c, where) for c in self.collectives],
            "memory": self.memory,
            "versions": self.versions,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the text that ``from_json`` reads."""
        return {
            **self._asdict(),
            **{
                name: [{**k._asdict(), "loops": [loop._asdict() for loop in k.loops]} for k in getattr(self, name)]
                for name in ("kernels", "others")
            },
            "collectives": [c._asdict() for c in self.collectives],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Schedule:
        """Return the schedule whose ``to_json`` wrote this text.

        Raises:
            KeyError, TypeError: ``to_json`` did not write it.
        """
        groups = {name: tuple(map(_operation, fields[name])) for name in ("kernels", "others")}
        return cls(
            fields["chip"], groups["kernels"], groups["others"], dict(fields["memory"]), dict(fields["versions"]),
            tuple(map(_collective, fields["collectives"])), tuple(fields["chips"]),
        )  # fmt: skip

    def __str__(self) -> str:
        chip, where = chip_named(self.chip), self.where
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{self.chip}: {chip.clock_hz / 1e9:.2f} GHz, {chip.hbm_bytes_per_second / 1e9:.0f} GB/s, "
            f"{chip.vmem_bytes >> 20} MiB of VMEM a core ({versions})"
        ]
        for kernel in self.kernels:
            lines += _detail(kernel, chip)
        if self.others:
            lines.append("beside the kernels, XLA runs:" if self.kernels else "XLA runs:")
            lines += [f"  {_short(k, chip)}" for k in sorted(self.others, key=lambda k: -(k.seconds(chip) or 0))]
        if self.kernels:
            code = _sum(_times(k.times, k.compute_seconds(chip)) for k in self.kernels)
            lines.append(
                f"kernels: {_time(self.seconds)} (code {_cycles(self.cycles)}, {_time(code)}; "
                f"traffic {_traffic(self.kernels, chip)}); floor {_time(self.floor_seconds)}"
            )
        if self.others:
            name = "the rest" if self.kernels else "together"
            lines.append(f"{name}: {_time(self.other_seconds)} (traffic {_traffic(self.others, chip)})")
        if self.chips:
            number = "no collective" if not self.collectives else "collectives:"
            lines.append(f"on {'x'.join(map(str, self.chips))} chips, {number}")
        for c in self.collectives:
            seconds = _time(None if where is None else c.seconds(where))
            lines.append(f"{seconds:>12}  {c.kind}{_often(c)}: {_size(c.bytes)} ({', '.join(c.arrays)}) {c.source}")
        if self.memory:
            lines.append("HBM of the program: " + ", ".join(f"{name} {_size(n)}" for name, n in self.memory.items()))
        if chip.cores > 1:
            lines.append(f"figures are those of one of {chip.cores} cores, which share a grid's parallel dimensions")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def _operation(fields: Mapping[str, Any]) -> OperationReport:
    return OperationReport(
        **{
            **fields,
            "grid": None if fields["grid"] is None else tuple(fields["grid"]),
            "stages": {name: tuple(pair) for name, pair in fields["stages"].items()},
            "loops": tuple(LoopReport(**loop) for loop in fields["loops"]),
            "notes": tuple(fields["notes"]),
        }
    )


def _sent(c: Collective, where: Slice) -> dict[str, Any]:
    groups = [list(group) for group in c.groups]
    return {**c._asdict(), "groups": groups, "seconds": c.seconds(where)}


def _collective(fields: Mapping[str, Any]) -> Collective:
    lists = {"arrays": tuple(fields["arrays"]), "groups": tuple(map(tuple, fields["groups"]))}
    return Collective(**{**fields, **lists})


def _times(times: int | None, figure: Any) -> Any:
    return None if times is None or figure is None else times * figure


def _sum(figures: Iterator[Any]) -> Any:
    found = list(figures)
    return None if any(f is None for f in found) else sum(found)


def _cycles(n: int | None) -> str:
    return "an unknown number of cycles" if n is None else f"{n:,} cycles"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown time"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _size(n: float | None) -> str:
    if n is None:
        return "unknown"
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << scale:
            return f"{n / (1 << scale):.1f} {unit}"
    return f"{n:.0f} B"


def _traffic(operations: tuple[OperationReport, ...], chip: Chip) -> str:
    """Return the bytes of all memory traffic, and the time that it takes."""
    moved = _sum(_times(k.times, k.hbm_bytes) for k in operations)
    return _size(moved) + ("" if moved is None else f", {_time(moved / chip.hbm_bytes_per_second)}")


def _both(k: OperationReport, chip: Chip) -> str:
    """Say how long the code and the traffic take, and which of the two is the limit."""
    code = _time(k.compute_seconds(chip)) if k.cycles is not None else "unknown time"
    return f"code {_cycles(k.cycles)} ({code}), traffic {_time(k.memory_seconds(chip))}: " + (
        "bound by neither for certain" if k.bound(chip) == "unknown" else f"bound by {k.bound(chip)}"
    )


def _busy(k: OperationReport) -> str:
    """List the units and the share of cycles in which each is busy."""
    return ", ".join(f"{u} {100 * c / k.cycles:.0f} %" for u, c in k.units.items() if c) if k.cycles else ""


def _beside(k: OperationReport) -> str:
    """Say which part of an operation's traffic is moved by copies that overlap other operations."""
    if not k.beside_bytes:
        return ""
    own = k.beside_bytes - k.across_bytes
    parts = [f"{_size(own)} of it copied beside other operations"] * (own > 0)
    parts += [f"{_size(k.across_bytes)} of it prefetched beside the program before"] * (k.across_bytes > 0)
    return "".join(f", {part}" for part in parts)


def _often(k: OperationReport | Collective) -> str:
    return "" if k.times == 1 else ", an unknown number of times" if k.times is None else f", {k.times} times"


def _detail(k: OperationReport, chip: Chip) -> list[str]:
    total = max(1, sum(k.parts.values()))
    lines = [f"{k.name}{_often(k)}: {_both(k, chip)}"]
    grid = "" if k.grid is None else f"grid {' x '.join(map(str, k.grid)) or 'of one step'}: "
    steps = ""
    if k.steps is not None:
        passes_over = k.grid_steps is not None and k.grid_steps > k.steps
        of = f"{k.steps:,} of {k.grid_steps:,} steps" if passes_over else f"{k.steps:,} steps"
        steps = f"{of} of {k.bundles_per_step:,} bundles{' (the others skip them)' if passes_over else ''}, "
    lines.append(f"  {grid}{steps}longest chain of dependences in a step {k.critical_path}")
    if k.cycles:
        lines.append("  units    " + _busy(k))
    lines.append("  cycles   " + ", ".join(f"{p} {100 * c / total:.0f} %" for p, c in k.parts.items() if c))
    if len(k.loops) > 1 or any(loop.turns is None for loop in k.loops):
        for loop in k.loops:
            turns = "unknown turns, in one of them" if loop.turns is None else f"{loop.turns} turns,"
            parts = ", ".join(f"{p} {100 * c / max(1, loop.cycles):.0f} %" for p, c in loop.parts.items() if c)
            lines.append(f"    {'  ' * (loop.level - 1)}loop: {turns} {loop.cycles:,} cycles: {parts}")
    if k.spills or k.fills:
        each = "in a step" if k.steps else "in all"
        lines.append(f"  spills   {k.spills} vector registers stored and {k.fills} loaded {each}")
    lines.append(
        "  bundles of the code: "
        + ", ".join(f"{name} {total} ({empty} empty)" for name, (total, empty) in k.stages.items() if total)
    )
    lines.append(
        f"  VMEM     {_size(k.vmem_bytes)} of {_size(chip.vmem_bytes)}"
        + (f", and {_size(k.resident_bytes)} of operands and results that XLA keeps there" if k.resident_bytes else "")
    )
    lines.append(
        f"  HBM      {_size(k.hbm_bytes)}{_beside(k)}: {_time(k.memory_seconds(chip))}; "
        f"floor {_time(k.floor_seconds(chip))} ({k.busiest[0] or 'no unit'} alone, or the traffic)"
    )
    lines += [f"  note     {note}" for note in k.notes]
    return lines


def _short(k: OperationReport, chip: Chip) -> str:
    where = f" ({k.source})" if k.source else ""
    busy = f"; {_busy(k)}" if _busy(k) else ""
    return (
        f"{_time(k.seconds(chip)):>10}  {k.name}{_often(k)}: {_cycles(k.cycles)}, {_size(k.hbm_bytes)} of HBM traffic"
        f"{_beside(k)}{busy}{where}" + "".join(f"; {note}" for note in k.notes)
    )
