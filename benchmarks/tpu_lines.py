"""Where a TPU kernel's instructions come from: vector work, loads, stores and spills by source line, on this CPU.

    python benchmarks/tpu_lines.py --fused --precision fast --value-heads 32
    python benchmarks/tpu_lines.py --variant kda --chip v5e --lines 60

The compiler writes each instruction's source line into its listing if it is asked to. Figures are instructions for each
value head and 128 tokens, a whole (8, 128) register each; four vector instructions fit into a cycle. A line is the one
that the compiler remembers: of equal expressions it keeps one. Forward calls only, since JAX drops the lines of what is
differentiated. ``portable-gdn tpu-report`` has the totals.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from portable_gdn.tpu.chips import CHIPS, chip_named
from portable_gdn.tpu.scheduling.compile import compile_for, environment
from portable_gdn.tpu.scheduling.dump import Dump, flags
from portable_gdn.tpu.scheduling.hlo import parse
from portable_gdn.tpu.scheduling.machine import run

environment(os.environ)  # before jax is imported

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from portable_gdn.harness.shapes import VARIANTS, Shape  # noqa: E402
from portable_gdn.harness.tpu_report import call  # noqa: E402

LOCATIONS = "--xla_mosaic_enable_llo_source_annotations=true"
ROOT = Path(__file__).parents[1]

_ADDRESS = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+[^{]*\{(.*)")
_PLACE = re.compile(r'loc\("([^"]+)":(\d+)')
_OP = re.compile(r"^\s*(?:(%\w+) = )?([a-z_][\w.]*)")
_SPILL = re.compile(r"#(allocation\d+)_spill")
_SOURCE = re.compile(r"vst_source=\*/(%\w+)")
#: Instructions with a ``v`` in front that are no work of the vector unit: other units' own, and what moves data.
_ELSEWHERE = re.compile(
    r"v(ld|st|mat|pop|perm|set|xpose|rot|tanh|exp2|log2|rsqrt|rcp|sync|sub\.core|add\.xlane|max\.xlane)"
)


def by_line(listing: str, times: list[int]) -> dict[str, Counter[str]]:
    """Instructions of a listing by the line they come from ("file:number", or "?" where none is named).

    Args:
        listing: of bundles, with locations.
        times: how often each bundle runs.

    Returns:
        Of each line: "vector", "load", "store", "spill" and "fill"; the last two count at the line whose value it is.
    """
    found: dict[str, Counter[str]] = {}
    made: dict[str, str] = {}  # the line that made a register's value
    kept: dict[str, str] = {}  # the line whose value a spill slot holds
    for line in listing.splitlines():
        bundle = _ADDRESS.match(line)
        if bundle is None:
            continue
        count = times[int(bundle[1], 0)]
        for instruction in bundle[2].split(";;"):
            op = _OP.match(instruction)
            if op is None:
                continue
            named = _PLACE.search(instruction)
            place, kind = f"{named[1]}:{named[2]}" if named else "?", ""
            spill = _SPILL.search(instruction)
            if op[2] == "vst":
                kind = "spill" if spill else "store"
                source = _SOURCE.search(instruction)
                if spill:
                    place = kept[spill[1]] = made.get(_value(source[1]), "?") if source else "?"
            elif op[2] == "vld":
                kind = "fill" if spill else "load"
                place = kept.get(spill[1], "?") if spill else place
            elif op[2].startswith("v") and not _ELSEWHERE.match(op[2]):
                kind = "vector"
            if op[1]:
                made[_value(op[1])] = place
            if kind:
                found.setdefault(place, Counter())[kind] += count
    return found


def _value(register: str) -> str:
    """A value's name, without the register that holds it."""
    return re.sub(r"_v[a-z]*\d+$", "", register)


def lines(folder: Path) -> Iterator[tuple[str, dict[str, Counter[str]], dict[str, int]]]:
    """Of each kernel in a folder of the compiler: its name, its lines, and its bundles at four points of the way."""
    dump = Dump(folder)
    for name in (operation.name for operation in parse(dump.hlo).operations if operation.kernel):
        files = dump.files(name)
        if files is not None:
            times = run(files.bundles).counts.tolist()
            yield name, by_line(dump.listing(name), times), {stage: n for stage, (n, _) in files.stages.items()}


def _shown(place: str) -> tuple[str, str]:
    """A line's place from here, and its text."""
    path, _, number = place.rpartition(":")
    file = Path(path)
    if not number or not file.is_file():
        return place, ""
    inside = file.resolve().is_relative_to(ROOT)
    return f"{file.name}:{number}", file.read_text().splitlines()[int(number) - 1].strip() if inside else ""


def main() -> int:
    """Compile a call and show its lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v6e", choices=list(CHIPS))
    parser.add_argument("--variant", default="gdn", choices=list(VARIANTS))
    parser.add_argument("--precision", default="fast", choices=("fast", "default", "highest"))
    parser.add_argument("--fused", action="store_true", help="convolution, l2norm and gates inside")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--lines", type=int, default=30, help="so many lines, those with the most vector work")
    options = parser.parse_args()
    shape = Shape(seqlen=options.seqlen, heads=options.heads, value_heads=options.value_heads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([LOCATIONS, flags(folder)])
        function, args = call("forward", options.variant, shape, precision=options.precision, fused=options.fused)
        compile_for(chip_named(options.chip), function, *args)
        share = shape.batch * shape.value_heads * shape.seqlen / 128
        for name, found, stages in lines(Path(folder)):
            _show(name, found, stages, share, options.lines)
    return 0


def _show(name: str, found: dict[str, Counter[str]], stages: dict[str, int], share: float, most: int) -> None:
    kinds = ("vector", "load", "store", "spill", "fill")
    table = Table("line", *kinds, "text", title=name)
    total = sum(found.values(), Counter[str]())
    table.add_row("all", *(f"{total[kind] / share:.1f}" for kind in kinds), "", end_section=True)
    for place, counts in sorted(found.items(), key=lambda item: (-item[1]["vector"], -item[1]["spill"]))[:most]:
        where, text = _shown(place)
        table.add_row(where, *(f"{counts[kind] / share:.1f}" for kind in kinds), Text(text))
    console = Console()
    console.print(table)
    console.print("bundles: " + ", ".join(f"{stage} {n}" for stage, n in stages.items()))


if __name__ == "__main__":
    sys.exit(main())
