"""``portable-gdn record``: run a suite on a backend and save the results, for comparison on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..harness.compute import Settings, backend_for, one_thread
from ..harness.record import record as run
from ..harness.suites import SUITES, suite
from .output import chosen, print_json, progress_bar, say

__all__ = ["record"]


def record(
    backend: Annotated[str, typer.Option("--backend", "-b", metavar="NAME", help="The backend to run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The recording to write, a safetensors file.")],
    suite_name: Annotated[
        str, typer.Option("--suite", metavar="NAME", help=f"The suite to run: {', '.join(SUITES)}.")
    ] = "standard",
    case: Annotated[str | None, typer.Option(help="Run only cases whose name contains this text.")] = None,
    stages: Annotated[
        bool, typer.Option(help="Also save the seven stages, so that `bisect` can find where machines differ.")
    ] = False,
    store_inputs: Annotated[
        bool, typer.Option("--store-inputs", help="Save the inputs themselves, not only their hash.")
    ] = False,
    precision: Annotated[str | None, typer.Option(help="Precision: fast, default or highest.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Tokens per chunk.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast q, k and v to this dtype.")] = None,
    emulate: Annotated[
        str | None, typer.Option(help="Round as a TPU does at this precision: fast, default or highest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Run a suite on a backend and write outputs, states and gradients to a file."""
    settings = Settings(precision, chunk_size, dtype, stages, emulate)
    own = backend_for(backend, settings)
    cases = chosen(case, suite(suite_name), f"the name of a case of suite {suite_name!r}")
    one_thread()
    with progress_bar("record") as update:
        done = run(output, own, suite_name, cases, settings, store_inputs, update)
    facts = {"file": str(output), "bytes": output.stat().st_size, **done._asdict()}
    if as_json:
        print_json(facts)
    else:
        of = f"{done.done} of {len(cases)} case{'' if len(cases) == 1 else 's'} of suite {suite_name}"
        say(f"{output}  {facts['bytes']} bytes: {of}")
        for name, why in done.refused.items():
            say(f"  not computed: {name}: {why}")
        for name, why in done.failed.items():
            say(f"  FAILED: {name}: {why}", "bold red")
    if done.failed or not done.done:
        raise typer.Exit(1)
