"""``portable-gdn bisect``: find the first stage, chunk, head and token at which two computations differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..harness.bisect import Bisected
from ..harness.bisect import bisect as run
from ..harness.compute import Settings, backend_for, one_thread
from ..harness.run_file import RunFile
from ..harness.suites import SUITES, suite
from ..spec.errors import GdnError, bad
from .output import chosen, print_json, progress_bar, say, times

__all__ = ["bisect"]


def bisect(
    recording: Annotated[
        Path | None, typer.Argument(help="A recording with stages, used instead of a first backend.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", "-b", metavar="NAME", help="The backend to compare: once with a recording, twice without."
        ),
    ] = None,
    suite_name: Annotated[
        str, typer.Option("--suite", metavar="NAME", help=f"The suite to run without a recording: {', '.join(SUITES)}.")
    ] = "quick",
    case: Annotated[str | None, typer.Option(help="Run only cases whose name contains this text.")] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Tokens per chunk on both sides; without a recording, 64 by default.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Precision: fast, default or highest.")] = None,
    emulate: Annotated[
        str | None,
        typer.Option(help="Round the last side as a TPU does at this precision: fast, default or highest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find where two backends, or a recording and a backend, first differ; exit with code 1 if they do."""
    names = list(backend or [])
    if len(names) != (2 if recording is None else 1):
        raise bad("--backend", f"given {times(len(names))}", "be given twice, or once beside a recording")
    settings = Settings(precision, chunk_size, None, True, emulate)
    own = backend_for(names[-1], settings)
    file = None if recording is None else RunFile(recording)
    if file is not None and not file.settings.stages:
        raise GdnError(f"{recording}: the recording holds no stages; record again with --stages.")
    first = file if file is not None else backend_for(names[0], settings._replace(emulate=None))
    cases = chosen(case, file.cases if file is not None else suite(suite_name), "a case's name")
    one_thread()
    with progress_bar("bisect") as update:
        found = run(first, own, cases, settings, update)
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    if not found.agree:
        raise typer.Exit(1)


def _print(found: Bisected) -> None:
    for line in found.lines():
        say(line)
    say(found.sentence(), "green" if found.agree else "bold red")
