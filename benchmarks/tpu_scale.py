"""The rule and layers on many TPU chips: predicted times and efficiency, from the TPU's compiler, on this CPU.

    python benchmarks/tpu_scale.py                 # compile all, show them
    python benchmarks/tpu_scale.py --write         # and keep the figures in tpu_scale.json and docs/many-chips.md
    python benchmarks/tpu_scale.py --only "tokens over 8" --chips v6e

Each is compiled for all chips of a slice and beside that for one chip: a minute each on an idle core, hours for all.
What is written is kept beside what was there. Figures belong to the versions of jax and libtpu that made them.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from portable_gdn.harness.scale_report import ScaleReport, ScaleShape, scale_report
from portable_gdn.harness.shapes import Shape
from portable_gdn.spec.errors import GdnError
from portable_gdn.tpu.chips import chip_named
from portable_gdn.tpu.slices import slice_of

FILE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "many-chips.md"
MARKS = ("<!-- scale table: benchmarks/tpu_scale.py --write -->\n", "<!-- end of scale table -->")
CHIPS = ("v5e", "v6e", "v7x")
GDN, KDA = Shape(value_heads=32), Shape(heads=32, value_heads=32)
#: Tokens of a long sequence over 8 chips, of one row, and of the tokens that each device has of other splits by tokens.
LONG, ROW = 262144, 8192


def _entries() -> list[tuple[ScaleShape, tuple[str, ...]]]:
    """Calls and the chips that they are compiled for."""
    made = [
        (ScaleShape("rule", variant, direction, shape._replace(seqlen=LONG), "tokens", 8, "fast", forgets=f), ("v6e",))
        for variant, shape in (("gdn", GDN), ("kda", KDA))
        for direction in ("forward", "train")
        for f in (True, False)
    ]
    made += [
        (ScaleShape("rule", "gdn", direction, GDN._replace(seqlen=ROW), "heads", 8, "fast"), ("v6e",))
        for direction in ("forward", "train")
    ]
    for chip in CHIPS:
        for chips in (1, 4, 16, 64):
            devices = slice_of(chip_named(chip), chips).devices
            for what in ("rule", "layer"):
                for direction in ("forward", "train"):
                    for split, shape in (
                        ("rows", GDN._replace(seqlen=ROW, batch=devices)),
                        ("heads", GDN._replace(seqlen=ROW)),
                        ("tokens", GDN._replace(seqlen=ROW * devices)),
                    ):
                        if split != "heads" or devices <= GDN.heads:
                            made.append((ScaleShape(what, "gdn", direction, shape, split, chips, "fast"), (chip,)))
    return made


ENTRIES = _entries()


def name(of: ScaleShape) -> str:
    """An entry's name in the file."""
    s = of.shape
    forgets = ", forgetting" if of.forgets else ""
    chips = f"{of.chips} chip{'s' if of.chips > 1 else ''}"
    return f"{of.variant} {of.what}, {of.direction}, B={s.batch} T={s.seqlen}, {of.split} over {chips}{forgets}"


def versions() -> str:
    """What the figures depend on."""
    return ", ".join(f"{package} {metadata.version(package)}" for package in ("jax", "libtpu"))


def figures(r: ScaleReport) -> dict[str, Any]:
    """Figures of a report, in milliseconds and bytes of one device."""
    s = r.schedule
    ms = lambda seconds: None if seconds is None else round(seconds * 1e3, 3)  # noqa: E731
    share = lambda part: None if part is None else round(part, 3)  # noqa: E731
    kinds: dict[str, list[Any]] = {}
    for c in s.collectives:
        held = kinds.setdefault(c.kind, [0, 0])
        held[0] += c.times or 1
        held[1] += (c.times or 1) * c.bytes
    return {
        "kernels": ms(s.seconds),
        "beside": ms(s.other_seconds),
        "links": ms(s.collective_seconds),
        "together": ms(r.seconds),
        "ideal": ms(r.ideal_seconds),
        "floor": ms(r.floor_seconds),
        "efficiency": share(r.efficiency),
        "kernel_efficiency": share(r.kernel_efficiency),
        "collectives": {kind: {"number": n, "bytes": size} for kind, (n, size) in sorted(kinds.items())},
        "temporary_bytes": s.memory.get("temporaries"),
    }


def table(found: dict[str, Any], made_with: str) -> str:
    """The table of the page."""
    lines = [
        "| | chip | kernels | beside | links | together | ideal | floor | efficiency | of kernels | collectives |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for of, chips in ENTRIES:
        for chip in chips:
            row = found.get(name(of), {}).get(chip)
            if not isinstance(row, dict):
                continue
            times = ("kernels", "beside", "links", "together", "ideal", "floor")
            cells = ["?" if row[t] is None else f"{row[t]:.2f}" for t in times]
            cells += ["?" if row[e] is None else f"{row[e]:.2f}" for e in ("efficiency", "kernel_efficiency")]
            sent = [f"{c['number']} {kind}, {c['bytes'] / 2**20:.1f} MiB" for kind, c in row["collectives"].items()]
            lines.append(f"| {name(of)} | {chip} | {' | '.join(cells)} | {'; '.join(sent) or 'none'} |")
    return "\n".join(lines) + f"\n\n(ms of one device; 16/32 heads, KDA 32/32, of 128; bfloat16, `fast`; {made_with})\n"


def with_table(text: str, made: str) -> str:
    """A page with its table replaced."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return before + MARKS[0] + made + MARKS[1] + after


def main() -> int:
    """Compile, show, and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the figures, and the table of the page")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--chips", default=",".join(CHIPS), help="names, with commas between them")
    options = parser.parse_args()
    held = json.loads(FILE.read_text()) if FILE.exists() else {"made with": "", "figures": {}}
    known = held["figures"] if held["made with"] == versions() else {}
    wanted = options.chips.split(",")
    work = [(of, chip) for of, chips in ENTRIES for chip in chips if options.only in name(of) and chip in wanted]
    shown = Table("call", "chip", "together", "ideal", "efficiency", title=f"ms ({versions()})")
    for of, chip in track(work, "compile", console=Console(stderr=True)):
        try:
            row: Any = figures(scale_report(of, chip))
            shown.add_row(name(of), chip, *(str(row[key]) for key in ("together", "ideal", "efficiency")))
        except GdnError as error:
            row = str(error)
            shown.add_row(name(of), chip, row)
        known.setdefault(name(of), {})[chip] = row
        if options.write:
            text = json.dumps({"made with": versions(), "figures": known}, indent=1, sort_keys=True)
            FILE.write_text(text + "\n")
            PAGE.write_text(with_table(PAGE.read_text(), table(known, versions())))
    Console().print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
