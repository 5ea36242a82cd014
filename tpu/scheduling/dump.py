"""Read the folder that libtpu's compiler writes about one program: the files of each operation, without jax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .listing import Bundle, parse
from .machine import run

__all__ = ["FLAGS", "STAGES", "UNITS", "Block", "Dump", "Files", "flags"]

#: What the compiler is asked to write, of the hundreds of files that it could.
FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex="
    "packed-bundles-(post-ra|pre-ra|no-ra-deps|no-spills-fills)|critical-path|.*per-bundle-utilization|deduplication-map"
)
#: Points at which the compiler counts bundles: before registers are given out; after that, without the dependences that
#: registers of one name bring; without spills and fills; in the end.
STAGES = ("pre-ra", "no-ra-deps", "no-spills-fills", "post-ra")
#: Columns of the file of units: slots of a bundle that are used.
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")


def flags(folder: str) -> str:
    """The compiler's flags for writing into ``folder``."""
    return FLAGS.format(folder=folder)


class Block(NamedTuple):
    """A straight piece of code: its region, the regions that this lies in, and its longest chain of dependences."""

    region: int
    parents: tuple[int, ...]
    length: int


class Files(NamedTuple):
    """What was written about one operation.

    bundles: the listing after register allocation.
    units: slots used, [bundles, len(UNITS)]; capacity: slots there are, [len(UNITS)].
    blocks: with their critical paths.
    stages: bundles, and empty ones among them, by the name of the point in ``STAGES``.
    """

    bundles: list[Bundle]
    units: np.ndarray
    capacity: np.ndarray
    blocks: tuple[Block, ...]
    stages: dict[str, tuple[int, int]]


class Dump:
    """The files of a folder by operation.

    Raises:
        ValueError: there is no file of the whole program in it, or a file is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, dict[str, Path]] = {}
        for path in sorted(folder.iterdir()):
            match = re.match(r"\d+-(.*?)-(?:(\d+)-)?([^/]+)\.(?:txt|html)$", path.name)
            named = re.match(r"\d+-(.+)-(\d+)-(" + "|".join(_KINDS) + r")\.txt$", path.name) or match
            if named:
                self._files.setdefault(named[1], {})[named[3]] = path
        if "hlo" not in self._files.get("TLP", {}):
            raise ValueError("the compiler wrote no text of the module")
        self._same = self._equivalents()

    def _text(self, operation: str, kind: str) -> str:
        path = self._files.get(operation, {}).get(kind)
        return path.read_text(errors="replace") if path else ""

    @property
    def hlo(self) -> str:
        """The module's text, constants in full."""
        return self._text("TLP", "hlo")

    def _equivalents(self) -> dict[str, str]:
        """For an operation, the one whose code it shares."""
        same: dict[str, str] = {}
        key = ""
        for line in self._text("TLP", "deduplication-map").splitlines():
            if line.startswith("key:"):
                key = line.removeprefix("key:")
            elif line.startswith("  "):
                same[line.strip()] = key
        return same

    def _name(self, operation: str) -> str | None:
        for name in (operation, self._same.get(operation, "")):
            written = re.sub(r"[^\w.<>-]", "_", name)
            if "packed-bundles-post-ra" in self._files.get(written, {}):
                return written
        return None

    def times(self) -> dict[str, int | None]:
        """How often the program runs each operation that has code of its own; None where that hangs on values."""
        bundles = parse(self._text("TLP", "packed-bundles-post-ra"))
        found = run(bundles)
        times: dict[str, int | None] = {}
        for at, bundle in enumerate(bundles):
            for i in bundle.instructions:
                called = re.search(r"%(\S+) = ", i.note) if i.op == "inlined_call" else None
                if called:
                    known = all(loop.turns is not None for loop in found.loops if loop.begin <= at < loop.end)
                    before = times.get(called[1], 0)
                    count = int(found.counts[at]) if known else None
                    times[called[1]] = None if count is None or before is None else before + count
        return times

    def listing(self, operation: str) -> str:
        """An operation's bundles as they were written; "" where it has no code, or shares that of nobody we know."""
        return self._text(self._name(operation) or "", "packed-bundles-post-ra")

    def files(self, operation: str) -> Files | None:
        """What was written about an operation, or None: it has no code, or shares that of nobody we know."""
        name = self._name(operation)
        if name is None:
            return None
        bundles = parse(self.listing(operation))
        units, capacity = _units(self._text(name, "pre-delay_hlo-static-per-bundle-utilization"), len(bundles))
        stages = {stage: _analysis(self._text(name, f"schedule-analysis_packed-bundles-{stage}")) for stage in STAGES}
        return Files(bundles, units, capacity, tuple(_blocks(self._text(name, "critical-path"))), stages)


_KINDS = [
    *(f"{prefix}packed-bundles-{stage}" for prefix in ("", "schedule-analysis_") for stage in STAGES),
    "critical-path",
    "pre-delay_hlo-static-per-bundle-utilization",
    "deduplication-map",
]


def _units(text: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of slots used, one a bundle, below names and capacities.

    Raises:
        ValueError: the rows are not those of the listing.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    names = [name.strip() for name in lines[1].split(",")] if len(lines) > 3 else []
    rows = np.array([line.split() for line in lines[4:]], np.int64)
    if rows.shape != (size, len(names)):
        raise ValueError(f"the file of units has {rows.shape} rows and columns, and the listing {size} bundles")
    capacity = np.array(lines[2].split(), np.int64)
    columns = [names.index(unit) for unit in UNITS]
    return rows[:, columns], capacity[columns]


def _analysis(text: str) -> tuple[int, int]:
    found = [re.search(rf"{what} scheduled bundles:\s*(\d+)", text) for what in ("total", "empty")]
    return tuple(int(m[1]) if m else 0 for m in found)  # type: ignore[return-value]


def _blocks(text: str) -> Iterator[Block]:
    heads = re.findall(
        r"New basic block in region: region(-?\d+) \{[^}]*?parent=(-?\d+)\}\s*(?:Length to end: (\d+))?", text
    )
    parent = {int(region): int(above) for region, above, _ in heads}
    for region, _, length in heads:
        yield Block(int(region), tuple(_chain(int(region), parent)), int(length or 0))


def _chain(region: int, parent: dict[int, int]) -> Sequence[int]:
    above = []
    while region in parent and parent[region] not in above:
        region = parent[region]
        above.append(region)
    return above
