"""The table by which the TPU plan decides how many heads share a grid step: compiled anew, on this CPU.

    python benchmarks/tpu_tiling.py            # compile all candidates, show them beside the table
    python benchmarks/tpu_tiling.py --write    # and put them into tpu/tiling.json

Each candidate is a whole compilation for a chip: half a minute, a quarter of an hour for all. ``--only v6e`` takes part
of them and keeps the rest.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from portable_gdn.harness.shapes import Shape
from portable_gdn.harness.tpu_report import TpuReport, tpu_reports
from portable_gdn.tpu.tiling import FILE, Entry, entries, trying

CHIPS = ("v6e", "v5e", "v7x")
HEADS = (8, 16)
DIMS = ((128, 128), (64, 64), (256, 256))


#: Calls to compile, and how many value heads may share their grid steps; no cycles yet.
CANDIDATES = [
    Entry(chip, precision, True, *dims, heads, cycles=0)
    for dims, precisions in ((DIMS[0], ("fast", "default")), *((more, ("default",)) for more in DIMS[1:]))
    for precision in precisions
    for chip in CHIPS
    for heads in HEADS
]


def name(c: Entry) -> str:
    """For people."""
    inside = "fused" if c.inside else "core"
    return f"{c.chip} {c.precision} {inside} {c.key_dim} x {c.value_dim}, {c.heads} heads"


def measure(c: Entry) -> Entry | None:
    """The candidate with its cycles, or None where it does not fit."""
    shape = Shape(seqlen=4096, heads=16, value_heads=32, key_dim=c.key_dim, value_dim=c.value_dim)
    with trying(c.heads):
        jax.clear_caches()  # a call is traced once, whatever the table says later
        (found,) = tpu_reports("forward", "gdn", shape, [c.chip], precision=c.precision, fused=c.inside)
    jax.clear_caches()
    if not isinstance(found, TpuReport) or found.cycles_per_head_128 is None:
        return None
    return c._replace(cycles=round(found.cycles_per_head_128))


def main() -> int:
    """Compile and show, and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the new figures")
    parser.add_argument("--only", default="", help="candidates whose name contains this")
    options = parser.parse_args()
    table = Table("candidate", "cycles", "in the table")
    before = {e._replace(cycles=0): e for e in entries()}
    made = {}
    for c in track([c for c in CANDIDATES if options.only in name(c)], "compile", console=Console(stderr=True)):
        entry = measure(c)
        known = before.get(c)
        table.add_row(name(c), str(entry.cycles) if entry else "does not fit", str(known.cycles) if known else "-")
        if entry is not None:
            made[c] = entry
            if options.write:
                write({**before, **made})
    Console().print(table)
    return 0


def write(found: dict[Entry, Entry]) -> None:
    """Keep what was found, a line each, in the order of the candidates."""
    lines = [json.dumps(found[c]._asdict()) for c in CANDIDATES if c in found]
    FILE.write_text('{\n "schedules": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    sys.exit(main())
