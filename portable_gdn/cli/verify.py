"""``portable-gdn verify``: compare every backend of this machine with the float64 oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..harness.compute import one_thread
from ..harness.verify import RECORDED, Report, Row, cases_for
from ..harness.verify import verify as run
from ..spec.errors import bad
from .output import chosen, console, print_json, progress_bar, say, say_verdict, show, write_whole

__all__ = ["verify"]


def verify(
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", metavar="NAME", help="Run only this backend; may be repeated."),
    ] = None,
    full: Annotated[
        bool, typer.Option(help="Run every case on every backend, and cases for every pair of options.")
    ] = False,
    case: Annotated[str | None, typer.Option(help="Run only cases whose name contains this text.")] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Print every tensor of every case.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every failure, not only the groups.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print the names of the cases without running them.")] = False,
    devices: Annotated[
        int | None,
        typer.Option(metavar="N", help="Shard every call by batch, heads and tokens over N virtual CPU devices."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the report to this file, as JSON.")
    ] = None,
) -> None:
    """Compare outputs, states and gradients of every backend that runs here with the float64 oracle."""
    if output is not None and not output.parent.is_dir():
        raise bad("--output", f"in {output.parent}, which is no folder", "name a file in a folder that exists")
    cases = chosen(case, cases_for(full), "a case's name" + ("" if full else " (more cases: --full)"))
    if listing:
        print_json([c.name for c in cases]) if as_json else print(*(c.name for c in cases), sep="\n")
        return
    one_thread()
    with progress_bar("verify") as update:
        report = run(backend or None, full or case is not None, cases, update, spread=True, devices=devices)
    if output is not None:
        write_whole(output, json.dumps(report.as_dict(), indent=1))
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report, all_rows, verbose)
    if not report.ok:
        raise typer.Exit(1)


def _share(row: Row) -> float:
    if not row.ok and not row.budget:
        return float("inf")
    return row.error / row.budget if row.budget else 0.0


def _figure(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"


def _row(table: Table, row: Row, narrow: bool) -> None:
    verdict = "[green]holds[/]" if row.ok else "[bold red]FAILS[/]"
    if not row.judged:
        verdict = "[yellow]not judged[/]"
    share = _share(row)
    used = f"{100 * share:.0f} %" if share < 1e4 else "-"
    where = [] if narrow else [f"{row.case}: {row.note}" if row.note else row.case]
    table.add_row(
        row.backend, row.tensor, _figure(row.error), _figure(row.expected), _figure(row.budget), used, verdict, *where
    )


def _table(title: str, rows: list[Row], case: str) -> None:
    narrow = console.width < 100
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("backend", "tensor", "error", "expected", "budget", "used", ""):
        table.add_column(
            name, justify="right" if name in ("error", "expected", "budget", "used") else "left", no_wrap=True
        )
    if not narrow:
        table.add_column(case, no_wrap=True, overflow="ellipsis")
    for row in rows:
        _row(table, row, narrow)
    show(table)


def _print(report: Report, all_rows: bool, verbose: bool) -> None:
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        kinds.setdefault((row.backend, row.tensor), []).append(row)
    worst = [max(rows, key=lambda r: (not r.ok, r.judged, _share(r))) for _, rows in sorted(kinds.items())]
    _table(
        "Relative error against the float64 oracle: the case of each tensor that uses most of its budget", worst, "case"
    )
    if all_rows:
        _table("Every result", report.rows, "case")
    for row in report.rows:
        if verbose and not row.ok:
            first = "" if row.token is None else f"; from token {row.token}, head {row.token_head}, on"
            _line("FAILS", row, f"(head {row.head}){first}")
        if row.ok and not row.judged and not all_rows:
            _line("not judged" if row.note else "not judged, ill-conditioned", row, f"(head {row.head})")
    groups = report.groups()
    for group in groups:
        say(f"  FAILS: {group.sentence()}", "bold red")
    if groups and not verbose:
        say("  (--verbose prints every failure, --all every result)")
    if report.not_run:
        say("Not run:")
        reasons: dict[tuple[str, str], list[str]] = {}
        for item in report.not_run:
            reasons.setdefault((item.backend, item.why), []).append(item.case)
        for (backend, why), cases in reasons.items():
            what = cases[0] if len(cases) == 1 else f"{len(cases)} cases ({', '.join(cases[:3])}, ...)"
            say(f"  {backend}: {what}: {why}")
    judged = sum(row.judged for row in report.rows)
    failed = sum(not row.ok for row in report.rows)
    if report.ok:
        say_verdict(True, f"{judged} results of {_where(report)}")
    elif not judged:
        say_verdict(False, "nothing could be compared")
    else:
        say_verdict(False, f"{failed} of {judged} results of {_where(report)}")


def _line(what: str, row: Row, more: str) -> None:
    say(
        f"  {what}: {row.backend}, {row.case}, {row.tensor}: error {_figure(row.error)}, "
        f"budget {_figure(row.budget)} {more} {row.note}".rstrip()
    )


def _where(report: Report) -> str:
    """Return how many cases ran on which backends; a library's recorded results were not computed here."""
    cases = len({row.case for row in report.rows})
    names = list(dict.fromkeys(row.backend for row in report.rows if row.backend != RECORDED))
    recorded = len({row.case for row in report.rows if row.backend == RECORDED})
    said = f"{cases} case{'' if cases == 1 else 's'} on {', '.join(names)}"
    kept = f"{recorded} recorded layer call{'' if recorded == 1 else 's'} of {RECORDED}, which did not run here"
    return said + (f" (and of {kept})" if recorded else "")
