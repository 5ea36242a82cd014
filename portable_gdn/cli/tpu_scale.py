"""The report of a call or a layer on many chips, for ``portable-gdn tpu-report --chips``."""

from __future__ import annotations

from rich import box
from rich.table import Table

from ..harness.scale_report import ScaleReport, ScaleShape, scale_report
from ..spec.errors import GdnError
from .output import console, print_json, progress_bar, show

__all__ = ["report_scale"]


def report_scale(of: ScaleShape, chips: list[str], use_cache: bool, as_json: bool) -> None:
    """Compile a call for so many chips of some kinds, and print what it costs.

    Raises:
        GdnError: it cannot be compiled for any of them.
    """
    reports: list[ScaleReport] = []
    failed: dict[str, GdnError] = {}
    with progress_bar("compile") as update:
        for chip in chips:
            update(f"{of.chips} {chip}", 0, 2)
            try:
                reports.append(scale_report(of, chip, use_cache=use_cache, progress=update))
            except GdnError as error:
                failed[chip] = error
    if not reports:
        raise next(iter(failed.values()))
    if as_json:
        print_json(reports[0].as_dict() if len(chips) == 1 else {
            "reports": [r.as_dict() for r in reports], "failed": {name: str(e) for name, e in failed.items()},
        })  # fmt: skip
        return
    _print(reports)
    for name, reason in failed.items():
        console.print(f"{name}: {reason}", markup=False)


def _print(reports: list[ScaleReport]) -> None:
    of = reports[0].of
    s = of.shape
    forgets = ", of gates that forget" if of.forgets else ""
    table = Table(
        title=f"{of.variant} {of.what}, {of.direction}, on {of.chips} chips, split by {of.split}{forgets}: "
        f"B={s.batch} T={s.seqlen} heads {s.heads}/{s.value_heads} dims {s.key_dim}/{s.value_dim} {s.dtype}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("chip", "kernels", "beside", "links", "together", "ideal", "floor", "efficiency"):
        table.add_column(name, justify="left" if name == "chip" else "right", no_wrap=True)
    for r in reports:
        t = r.schedule
        times = (t.seconds, t.other_seconds, t.collective_seconds, r.seconds, r.ideal_seconds, r.floor_seconds)
        efficiency = "?" if r.efficiency is None else f"{r.efficiency:.2f}"
        table.add_row(t.chip, *("?" if x is None else f"{x * 1e3:.3f}" for x in times), efficiency)
    show(table)
    console.print(
        "ms of one device: its kernels, what XLA runs beside them, collectives over the links between chips, and all "
        "of it one after the other; ideal: the same work if nothing were lost by splitting; floor: of the kernels "
        "alone, the busiest unit or the traffic; efficiency: ideal over together."
    )
    for r in reports:
        for c in r.schedule.collectives:
            often = "" if c.times == 1 else f", {c.times} times"
            size = f"{c.bytes / 2**20:.2f} MiB"
            console.print(f"{r.schedule.chip}: {c.kind}{often}, {size}: {', '.join(c.arrays)}", markup=False)
        if not r.schedule.collectives:
            console.print(f"{r.schedule.chip}: no collective")
