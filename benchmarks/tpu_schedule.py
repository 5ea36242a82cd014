"""Every Pallas kernel of this repository on every TPU: cycles, from the TPU's compiler, on this CPU.

    python benchmarks/tpu_schedule.py            # compile all, compare with tpu_schedule.json beside this file
    python benchmarks/tpu_schedule.py --write    # and keep the new figures there, and in the table of its page

Figures are exact and belong to the versions of jax and libtpu that they were made with, the newest that constraints.txt
knows; the file names them.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from portable_gdn.harness.tpu_report import Shape, TpuReport, tpu_reports

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[1]
CHIPS = ("v5e", "v5p", "v6e", "v7x")
MOST = 1.03  # times the cycles on file, above which a kernel has grown


class Entry(NamedTuple):
    """A call to compile."""

    op: str
    variant: str
    fused: bool
    precision: str
    shape: Shape

    @property
    def name(self) -> str:
        """Its name in the file."""
        s = self.shape
        variant = f"{self.variant} n={s.groups}" if self.variant == "grouped" else self.variant
        words = [self.op, variant, *(["fused"] if self.fused else []), self.precision]
        words += [f"B={s.batch} T={s.seqlen}", *([f"N={s.sequences}"] if s.sequences else [])]
        return " ".join([*words, f"{s.heads}/{s.value_heads} {s.key_dim}x{s.value_dim} {s.dtype}"])


LONG = Shape(seqlen=8192)
GROUPED = LONG._replace(value_heads=32)
WIDE = LONG._replace(heads=8, value_heads=8, key_dim=256, value_dim=256)
MODES = ("fast", "default")
ENTRIES = (
    *(Entry("forward", "gdn", True, precision, shape) for shape in (GROUPED, LONG) for precision in MODES),
    *(Entry("forward", "gdn", True, precision, GROUPED._replace(sequences=8)) for precision in MODES),
    *(Entry("forward", "gdn", False, precision, GROUPED) for precision in (*MODES, "highest")),
    *(Entry("forward", "gdn", False, precision, LONG) for precision in MODES),
    Entry("forward", "gdn", False, "default", WIDE),
    Entry("forward", "gdn", False, "default", LONG._replace(key_dim=64, value_dim=64)),
    Entry("forward", "delta", False, "default", LONG),
    *(Entry("forward", variant, True, precision, LONG) for variant in ("kda", "gdn2") for precision in MODES),
    *(Entry("forward", variant, True, "fast", WIDE) for variant in ("gdn", "grouped")),
    Entry("forward", "gla", False, "fast", LONG),
    *(Entry("backward", variant, False, precision, LONG) for variant in ("gdn", "kda", "gdn2") for precision in MODES),
    Entry("backward", "gdn", False, "fast", GROUPED),
)


def versions() -> str:
    """What the figures depend on."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "libtpu"))


def measure(entry: Entry, chips: tuple[str, ...] = CHIPS) -> dict[str, Any]:
    """Figures of a call by chip, or why there are none."""
    found = tpu_reports(entry.op, entry.variant, entry.shape, chips, precision=entry.precision, fused=entry.fused)
    return {chip: _figures(r) if isinstance(r, TpuReport) else str(r) for chip, r in zip(chips, found, strict=True)}


def _figures(report: TpuReport) -> dict[str, Any] | str:
    s = report.schedule
    if s.cycles is None:
        return "how often a part of it runs depends on values"
    return {
        "cycles": s.cycles,
        "cycles_per_head_128": round(report.cycles_per_head_128 or 0),
        "microseconds": round((s.seconds or 0) * 1e6, 1),
        "floor_microseconds": round((s.floor_seconds or 0) * 1e6, 1),
        "beside_microseconds": round((s.other_seconds or 0) * 1e6, 1),
        "kernels": {
            k.name: {
                "bundles_per_step": k.bundles_per_step,
                "steps": k.steps,
                "critical_path": k.critical_path,
                "mxu_utilization": round(k.units["MXU"] / k.cycles, 3),
                "spills": k.spills,
                "vmem_bytes": k.vmem_bytes,
            }
            for k in s.kernels
        },
    }


def on_file() -> tuple[str, dict[str, Any]]:
    """The versions that made the figures on file, and the figures by entry and chip."""
    held = json.loads(FILE.read_text()) if FILE.exists() else {"made with": "", "figures": {}}
    return held["made with"], held["figures"]


def table(figures: dict[str, Any], made_with: str) -> str:
    """The table of ``PAGE``."""
    lines = ["| call | precision | " + " | ".join(CHIPS) + " |", "|---|---|" + "---|" * len(CHIPS)]
    for entry in ENTRIES:
        row = figures.get(entry.name)
        if row is None:
            continue
        s = entry.shape
        op = "forward and backward" if entry.op == "backward" else entry.op
        what = f"{op} {entry.variant}{f' n={s.groups}' if entry.variant == 'grouped' else ''}"
        what += ", fused" if entry.fused else ""
        what += f", {s.sequences} packed" if s.sequences else ""
        what += f", {s.heads}/{s.value_heads} heads, {s.key_dim} x {s.value_dim}"
        cells = [f"{row[c]['cycles_per_head_128']}" if isinstance(row.get(c), dict) else "-" for c in CHIPS]
        lines.append(f"| {what} | {entry.precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n(B=1, T={LONG.seqlen}, {LONG.dtype}; {made_with})\n"


#: The page with the table of these figures.
PAGE = ROOT / "docs" / "figures.md"
MARKS = ("<!-- tpu table: benchmarks/tpu_schedule.py --write -->\n", "<!-- end of tpu table -->")


def replaced(text: str, made: str) -> str:
    """A page with its table replaced."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return before + MARKS[0] + made + MARKS[1] + after


def main() -> int:
    """Compile, compare, and perhaps write. The exit code is 1 if a kernel has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the new figures, and the table of its page")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    options = parser.parse_args()
    made_with, before = on_file()
    if made_with != versions():
        before = {}
    console = Console()
    shown = Table("call", *CHIPS, title=f"cycles per value head and 128 tokens ({versions()})")
    found, grown = {}, False
    for entry in track([e for e in ENTRIES if options.only in e.name], "compile", console=Console(stderr=True)):
        found[entry.name] = measure(entry)
        cells = []
        for chip, figures in found[entry.name].items():
            old = before.get(entry.name, {}).get(chip)
            if isinstance(figures, str):
                cells.append(figures)
                continue
            ratio = figures["cycles"] / old["cycles"] if isinstance(old, dict) else 1.0
            grown |= ratio > MOST
            cells.append(f"{figures['cycles_per_head_128']}" + (f" ({ratio:.3f} x)" if ratio != 1.0 else ""))
        shown.add_row(entry.name, *cells)
    console.print(shown)
    if options.write:
        names = {e.name for e in ENTRIES}
        figures = {name: row for name, row in {**before, **found}.items() if name in names}
        FILE.write_text(json.dumps({"made with": versions(), "figures": figures}, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(replaced(PAGE.read_text(), table(figures, versions())))
    return int(grown and not options.write)


if __name__ == "__main__":
    sys.exit(main())
