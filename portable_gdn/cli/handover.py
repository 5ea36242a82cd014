"""``portable-gdn handover``: begin sequences on one backend and continue them on another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..harness.compare import finite
from ..harness.compute import Settings, backend_for, one_thread
from ..harness.handover import CASES, Carried, HandedOver, begin, finish, load, save
from ..harness.live_handover import LIVE, move
from ..harness.run_file import check_target
from ..spec.errors import GdnError, bad
from .output import chosen, print_json, progress_bar, say, say_verdict, show, times

__all__ = ["handover"]


def handover(
    states: Annotated[
        Path | None, typer.Argument(help="A file of states that another machine wrote with --output.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME",
            help="Twice: the backend to begin on, then the one to continue on. Once with STATES or --output.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Only begin the sequences, and write their states here.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Run only cases whose name contains this text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Continue sequences in mid-course on another backend, in the other state layout, and check the results.

    If both backends run here, requests that are being served are moved too: a slot of a pool with waiting drafts.
    """
    names = list(backend or [])
    wanted = 1 if states is not None or output is not None else 2
    if len(names) != wanted:
        raise bad("--backend", f"given {times(len(names))}", f"be given {times(wanted)} here")
    if states is not None and output is not None:
        raise GdnError("STATES and --output are both given; give STATES to continue, or --output to write states.")
    if output is not None:
        check_target(output)
    here = states is None and output is None  # both backends are here, and requests that are being served move, too
    known = (*CASES, *LIVE) if here else CASES
    wanted_cases = chosen(case, known, f"one of {', '.join(repr(c.name) for c in known)}")
    cases, live = ([c for c in wanted_cases if c in some] for some in (CASES, LIVE))
    one_thread()
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    with progress_bar("handover") as update:
        if states is not None:
            carried = [item for item in load(states) if case is None or case in item.case.name]
        else:
            carried, refused, failed = begin(backend_for(names[0], Settings()), cases, update)
        if output is not None:
            _saved(output, carried, refused, failed, as_json)
            return
        rows, *more = finish(backend_for(names[-1], Settings()), carried, update)
        refused, failed = refused | more[0], failed | more[1]
        if here and live:
            moved: list[HandedOver]
            first, second = (backend_for(name, Settings()) for name in names)
            moved, *more = move(first, second, live, update)
            rows, refused, failed = rows + moved, refused | more[0], failed | more[1]
    ok = bool(rows) and all(row.ok for row in rows) and not failed
    if as_json:
        print_json({"ok": ok, "results": finite([row._asdict() for row in rows]), "refused": refused, "failed": failed})
    else:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for name in ("case", "tensor", "layout", "error", "budget", ""):
            table.add_column(name, justify="right" if name in ("error", "budget") else "left", no_wrap=True)
        for row in rows:
            verdict = "[green]holds[/]" if row.ok else "[bold red]FAILS[/]"
            table.add_row(row.case, row.tensor, row.layouts, f"{row.error:.1e}", f"{row.budget:.1e}", verdict)
        show(table)
        _left_out("not handed over", refused, failed)
        source = names[0] if here else carried[0].backend
        count = len({row.case for row in rows})
        what = f"{count} sequence{'' if count == 1 else 's'} from {source} to {names[-1]}"
        say_verdict(ok, what if rows else "nothing was handed over")
    if not ok:
        raise typer.Exit(1)


def _saved(
    output: Path, carried: list[Carried], refused: dict[str, str], failed: dict[str, str], as_json: bool
) -> None:
    if not carried:
        raise GdnError(f"none of the cases could be begun: {next(iter((refused | failed).values()))}")
    save(output, carried)
    if as_json:
        cases = [item.case.name for item in carried]
        print_json({"file": str(output), "cases": cases, "refused": refused, "failed": failed})
    else:
        count = len(carried)
        say(f"{output}  states of {count} sequence{'' if count == 1 else 's'}, cut at token {carried[0].cut}")
        _left_out("not begun", refused, failed)
    if failed:
        raise typer.Exit(1)


def _left_out(what: str, refused: dict[str, str], failed: dict[str, str]) -> None:
    for name, why in refused.items():
        say(f"  {what}: {name}: {why}")
    for name, why in failed.items():
        say(f"  FAILED: {name}: {why}", "bold red")
