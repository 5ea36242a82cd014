"""Whole layers on TPUs, forward and in training, beside the same layers on ``xla``: times from the TPU's compiler.

    python benchmarks/tpu_layer.py                 # compile all, compare with tpu_layer.json beside this file
    python benchmarks/tpu_layer.py --write         # and keep the new figures there, and in the tables of pages
    python benchmarks/tpu_layer.py --only gdn --chips v6e

Figures are exact and belong to the versions of jax and libtpu that they were made with; the file names them.
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

from portable_gdn.harness.layer_report import PARTS, LayerReport, LayerShape, layer_reports
from portable_gdn.harness.shapes import Shape

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[1]
#: Pages that have the table between its marks, and whether they have the short one.
PAGES = ((ROOT / "docs" / "tpu-layer.md", False), (ROOT / "README.md", True))
MARKS = ("<!-- layer table: benchmarks/tpu_layer.py --write -->\n", "<!-- end of layer table -->")
CHIPS = ("v5e", "v6e", "v7x")
MOST = 1.03  # times the milliseconds on file, above which a layer has grown

LONG = Shape(seqlen=8192)
#: Variant, hidden size and dimensions of each layer.
MODELS = (
    ("gdn", 2048, LONG._replace(value_heads=32)),
    ("kda", 2304, LONG._replace(heads=32, value_heads=32)),
    ("gdn2", 2048, LONG),
)
ENTRIES = tuple(
    LayerShape(scope, variant, direction, hidden, shape, precision, backend)
    for variant, hidden, shape in MODELS
    for scope, precision, backend in (
        ("mixer", "fast", "pallas"),
        ("mixer", "default", "pallas"),
        ("layer", "fast", "pallas"),
        ("layer", "fast", "xla"),
    )
    for direction in ("forward", "train")
) + tuple(
    LayerShape("mixer", "gdn", "train", 2048, MODELS[0][2], precision, norm=False) for precision in ("fast", "default")
)


def name(of: LayerShape) -> str:
    """An entry's name in the file."""
    s = of.shape
    words = (of.variant, of.scope, of.direction, of.precision or "", of.backend, f"hidden {of.hidden}")
    return " ".join((*words, f"{s.heads}/{s.value_heads}", *([] if of.norm else ["without norm"])))


def versions() -> str:
    """What the figures depend on."""
    return ", ".join(f"{package} {metadata.version(package)}" for package in ("jax", "libtpu"))


def measure(of: LayerShape, chips: tuple[str, ...]) -> dict[str, Any]:
    """Figures of a layer by chip, in milliseconds and bytes, or why there are none."""
    found = layer_reports(of, chips)
    return {chip: _figures(r) if isinstance(r, LayerReport) else str(r) for chip, r in zip(chips, found, strict=True)}


def _figures(report: LayerReport) -> dict[str, Any] | str:
    if report.total_seconds is None or report.floor_seconds is None:
        return "how often a part of it runs depends on values"
    return {
        **{part: round((seconds or 0.0) * 1e3, 3) for part, seconds in report.seconds().items()},
        "together": round(report.total_seconds * 1e3, 3),
        "floor": round(report.floor_seconds * 1e3, 3),
        "bytes": report.total_bytes,
        "temporary_bytes": report.schedule.memory.get("temporaries"),
    }


def table(figures: dict[str, Any], made_with: str) -> str:
    """The table of a page: ms of each layer by part and chip."""
    lines = [
        "| | chip | " + " | ".join(PARTS) + " | together | floor | on xla |",
        "|---|---|" + "---|" * (len(PARTS) + 3),
    ]
    for of in ENTRIES:
        if of.backend == "xla":
            continue
        other = figures.get(name(of._replace(backend="xla")), {})
        rows = figures.get(name(of), {})
        for chip in CHIPS:
            row, beside, s = rows.get(chip), other.get(chip), of.shape
            if not isinstance(row, dict):
                continue
            scope = of.scope if of.norm else f"{of.scope} without norm and gate"
            what = f"{of.variant} {scope}, {s.heads} / {s.value_heads} heads, {of.direction}, `{of.precision}`"
            cells = [f"{row[part]:.2f}" for part in (*PARTS, "together", "floor")]
            cells.append(f"{beside['together']:.2f}" if isinstance(beside, dict) else "")
            lines.append(f"| {what} | {chip} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n(ms; B=1, T={LONG.seqlen}, {LONG.dtype}; {made_with})\n"


def short_table(figures: dict[str, Any], made_with: str) -> str:
    """The table of the README: ms of whole layers by chip."""
    titles = {"gdn": "Gated DeltaNet", "kda": "KDA", "gdn2": "GDN-2"}
    lines = [f"| layer, bfloat16 | pass | {' | '.join(CHIPS)} | v6e by XLA |", "|---|---|" + "---|" * (len(CHIPS) + 1)]
    for of in ENTRIES:
        if (of.scope, of.backend) != ("layer", "pallas"):
            continue
        rows = figures.get(name(of), {})
        other = figures.get(name(of._replace(backend="xla")), {}).get("v6e")
        cells = [f"{row['together']:.2f}" if isinstance(row, dict) else "" for row in map(rows.get, CHIPS)]
        cells.append(f"{other['together']:.2f}" if isinstance(other, dict) else "")
        s = of.shape
        what = f"{titles[of.variant]}, hidden size {of.hidden}, {s.heads} / {s.value_heads} heads"
        passes = "forward" if of.direction == "forward" else "forward and backward"
        lines.append(f"| {what} | {passes} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n(ms; B=1, T={LONG.seqlen}, precision fast; {made_with})\n"


def with_table(text: str, made: str) -> str:
    """A page with its table replaced; one without the marks as it is."""
    before, mark, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    return before + MARKS[0] + made + MARKS[1] + after if mark and end else text


def main() -> int:
    """Compile, compare, and perhaps write. The exit code is 1 if a layer has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the new figures, and the tables of pages")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--chips", default=",".join(CHIPS), help="names, with commas between them")
    options = parser.parse_args()
    held = json.loads(FILE.read_text()) if FILE.exists() else {"made with": "", "figures": {}}
    before = held["figures"] if held["made with"] == versions() else {}
    chips = tuple(options.chips.split(","))
    shown = Table("layer", *chips, title=f"ms ({versions()})")
    found: dict[str, Any] = {}
    grown = False
    for of in track([e for e in ENTRIES if options.only in name(e)], "compile", console=Console(stderr=True)):
        found[name(of)] = measure(of, chips)
        cells = []
        for chip, row in found[name(of)].items():
            if isinstance(row, str):
                cells.append(row)
                continue
            old = before.get(name(of), {}).get(chip)
            ratio = row["together"] / old["together"] if isinstance(old, dict) else 1.0
            grown |= ratio > MOST
            cells.append(f"{row['together']:.3f}" + (f" ({ratio:.3f} x)" if ratio != 1.0 else ""))
        shown.add_row(name(of), *cells)
    Console().print(shown)
    if options.write:
        figures = {name(of): {**before.get(name(of), {}), **found.get(name(of), {})} for of in ENTRIES}
        figures = {key: row for key, row in figures.items() if row}
        FILE.write_text(json.dumps({"made with": versions(), "figures": figures}, indent=1, sort_keys=True) + "\n")
        for page, short in PAGES:
            made = (short_table if short else table)(figures, versions())
            page.write_text(with_table(page.read_text(), made))
    return int(grown and not options.write)


if __name__ == "__main__":
    sys.exit(main())
