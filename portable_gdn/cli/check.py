"""``portable-gdn check``: test the properties of a backend on many random cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..harness.compute import one_thread
from ..harness.fuzz import Fuzzed, fuzz, reproducer
from ..harness.run_file import check_target
from ..spec.errors import bad
from . import interruption
from .output import print_json, progress_bar, say, say_verdict, show, write_whole

__all__ = ["check"]


def check(
    backend: Annotated[str, typer.Option("--backend", "-b", metavar="NAME", help="The backend to check.")],
    cases: Annotated[int, typer.Option(help="Total number of cases, over all properties.")] = 2000,
    minutes: Annotated[float | None, typer.Option(help="Stop after this many minutes.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds draw equal cases.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME", help="Check only this property; may be repeated.")
    ] = None,
    reproducers: Annotated[
        Path, typer.Option(help="Folder for scripts that reproduce failures, one per failure; created if missing.")
    ] = Path(),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the summary to this file, as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Test on random cases that a backend has the properties every correct one has; failing cases are shrunk."""
    if cases < 1:
        raise bad("--cases", str(cases), "be at least 1")
    if minutes is not None and minutes <= 0:
        raise bad("--minutes", str(minutes), "be positive")
    if reproducers.exists() and not reproducers.is_dir():
        raise bad("--reproducers", f"{reproducers}, which is no folder", "be a folder, or a name for one that is made")
    if output is not None:
        check_target(output)
    one_thread()
    with progress_bar("check") as update:
        found = fuzz(backend, cases, None if minutes is None else 60 * minutes, seed, only, progress=update)
    interruption.leaves("what was found is lost, and no report was written")
    files = [reproducer(failure, reproducers) for failure in found.failures]
    if output is not None:
        write_whole(output, json.dumps(found.as_dict(), indent=1))
    if as_json:
        print_json({**found.as_dict(), "reproducers": [str(path) for path in files]})
    else:
        _print(found, files)
    if found.failures or not found.held:
        raise typer.Exit(1)
    if found.interrupted:
        raise typer.Exit(130)


def _print(found: Fuzzed, files: list[Path]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("property", "held", "refused", ""):
        table.add_column(name, justify="right" if name in ("held", "refused") else "left", no_wrap=bool(name))
    failed = {failure.property for failure in found.failures}
    for name in found.asked:
        said = "[bold red]FAILS[/]" if name in failed else ""
        if name in found.not_drawn:
            said = "[yellow]not drawn[/]"
        elif name in found.not_computed:
            said = "[yellow]nothing computed[/]"
        table.add_row(name, str(found.held[name]), str(found.refused[name] or ""), said)
    show(table)
    for failure, path in zip(found.failures, files, strict=True):
        say(f"{failure.property}: {failure.sentence}")
        say(f"  {path}: run `python {path}` to reproduce it")
    say_verdict(bool(found.held) and not found.failures, found.sentence())
