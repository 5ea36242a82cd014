"""The report of a whole layer, or of its mixer, for ``portable-gdn tpu-report --op layer``."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from ..harness.layer_report import PARTS, LayerReport, LayerShape, layer_reports
from ..spec.errors import GdnError
from .output import console, print_json, progress_bar, show

__all__ = ["report_layers"]


def report_layers(layer: LayerShape, chips: list[str], use_cache: bool, as_json: bool) -> None:
    """Compile a layer for the given chips and print its cost.

    Raises:
        GdnError: The layer cannot be compiled for any of the chips.
    """
    with progress_bar("compile") as update:
        update(" ".join(chips), 0, len(chips))
        found = layer_reports(layer, chips, use_cache=use_cache, progress=update)
    reports = [r for r in found if isinstance(r, LayerReport)]
    failed = {name: str(r) for name, r in zip(chips, found, strict=True) if isinstance(r, GdnError)}
    if not reports:
        raise GdnError(next(iter(failed.values())))
    if as_json:
        print_json(reports[0].as_dict() if len(chips) == 1 else {
            "reports": [r.as_dict() for r in reports], "failed": failed,
        })  # fmt: skip
        return
    _print(reports)
    for name, error in failed.items():
        console.print(f"{name}: {error}", markup=False)


def _print(reports: list[LayerReport]) -> None:
    of = reports[0].layer
    s = of.shape
    table = Table(
        title=f"{of.variant} {of.scope}, {of.direction}: hidden {of.hidden}, B={s.batch} T={s.seqlen} heads "
        f"{s.heads}/{s.value_heads} dims {s.key_dim}/{s.value_dim} {s.dtype}, on {of.backend}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("chip", *PARTS, "together", "floor", "GiB"):
        table.add_column(name, justify="left" if name == "chip" else "right", no_wrap=True)
    for report in reports:
        times = report.seconds()
        total = "?" if report.total_bytes is None else f"{report.total_bytes / 2**30:.2f}"
        row = [*(times[part] for part in PARTS), report.total_seconds, report.floor_seconds]
        table.add_row(report.schedule.chip, *map(_milliseconds, row), total)
    show(table)
    console.print(
        "ms, each operation the longer of its code and its HBM traffic; projections: XLA's products with what it fused "
        "to them; copies: from one layout to another; floor: all products at the matrix units' peak, or arguments and "
        "results moved once, whichever is longer; GiB of HBM traffic."
    )
    if len(reports) == 1:
        for part, operation in sorted(reports[0].operations(), key=lambda pair: -_seconds(reports[0], pair[1])):
            if _seconds(reports[0], operation) >= 1e-6:
                text = f"{_milliseconds(_seconds(reports[0], operation)):>7} ms  {part}: {operation.name}"
                console.print(text, markup=False, soft_wrap=True)
        if reports[0].plan:
            console.print(f"plan: {reports[0].plan}", markup=False, soft_wrap=True)


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.3f}"


def _seconds(report: LayerReport, operation: Any) -> float:
    from ..tpu.chips import chip_named

    return (operation.seconds(chip_named(report.schedule.chip)) or 0.0) * (operation.times or 1)
