"""``portable-gdn record``: run a suite on a backend and keep what came of it, for another machine to compare."""

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
    backend: Annotated[str, typer.Option("--backend", "-b", metavar="NAME", help="What computes.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The recording, a safetensors file.")],
    suite_name: Annotated[
        str, typer.Option("--suite", metavar="NAME", help=f"One of {', '.join(SUITES)}.")
    ] = "standard",
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    stages: Annotated[bool, typer.Option(help="Keep the seven stages too, to tell where machines part.")] = False,
    store_inputs: Annotated[bool, typer.Option("--store-inputs", help="Keep the inputs, not only a hash.")] = False,
    precision: Annotated[str | None, typer.Option(help="fast, default or highest.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Tokens a chunk.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast q, k and v to it.")] = None,
    emulate: Annotated[str | None, typer.Option(help="Round as a TPU does: fast, default or highest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Run a suite on one backend and write outputs, states and gradients to a file."""
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
