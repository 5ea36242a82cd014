"""``portable-gdn handover``: a sequence begun on one backend is continued on another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..harness.compute import Settings, backend_for, one_thread
from ..harness.handover import CASES, Carried, begin, finish, load, save
from ..harness.run_file import check_target
from ..spec.errors import GdnError, bad
from .output import console, print_json, progress_bar

__all__ = ["handover"]


def handover(
    states: Annotated[Path | None, typer.Argument(help="States that another machine wrote with --output.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="One, or two: begun on, continued on.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Begin only, and write the states here.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Carry states from the middle of sequences to another backend, in the other layout, and judge what follows."""
    names = list(backend or [])
    wanted = 1 if states is not None or output is not None else 2
    if len(names) != wanted:
        raise bad("--backend", f"given {len(names)} times", f"be given {'once' if wanted == 1 else 'twice'} here")
    if states is not None and output is not None:
        raise GdnError("STATES and --output are both given; states are continued from, or written.")
    if output is not None:
        check_target(output)
    cases = [c for c in CASES if case is None or case in c.name]
    if not cases:
        raise bad("--case", repr(case), f"be part of one of {', '.join(repr(c.name) for c in CASES)}")
    one_thread()
    refused: dict[str, str] = {}
    with progress_bar("handover") as update:
        if states is not None:
            carried = [item for item in load(states) if case is None or case in item.case.name]
        else:
            carried, refused = begin(backend_for(names[0], Settings()), cases, update)
        if output is not None:
            _saved(output, carried, refused, as_json)
            return
        rows, more = finish(backend_for(names[-1], Settings()), carried, update)
    refused |= more
    ok = bool(rows) and all(row.ok for row in rows)
    if as_json:
        print_json({"ok": ok, "results": [row._asdict() for row in rows], "refused": refused})
    else:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for name in ("case", "tensor", "layout", "error", "budget", ""):
            table.add_column(name, justify="right" if name in ("error", "budget") else "left", no_wrap=True)
        for row in rows:
            verdict = "[green]holds[/]" if row.ok else "[bold red]FAILS[/]"
            table.add_row(row.case, row.tensor, row.layouts, f"{row.error:.1e}", f"{row.budget:.1e}", verdict)
        console.print(table)
        for name, why in refused.items():
            console.print(f"  not handed over: {name}: {why}", markup=False)
        source = carried[0].backend if carried else names[0]
        verdict = "[green]holds[/]" if ok else "[bold red]fails[/]"
        what = (
            f"{len({row.case for row in rows})} sequences from {source} to {names[-1]}"
            if rows
            else "nothing was handed over"
        )
        console.print(f"{verdict}: {what}")
    if not ok:
        raise typer.Exit(1)


def _saved(output: Path, carried: list[Carried], refused: dict[str, str], as_json: bool) -> None:
    if not carried:
        raise GdnError(f"none of the cases could be begun: {next(iter(refused.values()))}")
    save(output, carried)
    if as_json:
        print_json({"file": str(output), "cases": [item.case.name for item in carried], "refused": refused})
    else:
        console.print(f"{output}  states of {len(carried)} sequences, cut at token {carried[0].cut}")
        for name, why in refused.items():
            console.print(f"  not begun: {name}: {why}", markup=False)
