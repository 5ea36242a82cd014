"""``portable-gdn doctor``: problems in the operands that a file holds, and the error of states stored in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from ..harness.compare import finite
from ..harness.doctor import diagnose
from ..harness.run_file import check_target
from ..harness.state_errors import HeadStates, of_file
from ..serving.at_rest import BYTES, DTYPES, choose_dtypes
from ..spec.errors import GdnError
from .output import console, print_json, progress_bar, say, show, write_whole

__all__ = ["doctor"]

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def doctor(
    file: Annotated[
        Path,
        typer.Argument(
            help="A recording, or a safetensors file with q, k, v, g, beta; with --states also a port or checkpoint."
        ),
    ],
    states: Annotated[
        bool, typer.Option("--states", help="Report the error of each head's outputs for each storage dtype of states.")
    ] = False,
    within: Annotated[
        float | None,
        typer.Option(
            help="With --states: the largest relative error of outputs when choosing dtypes; 1e-3 by default."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="With --states: number of tokens, 4096 by default; a shorter recording is repeated."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="With --states: draw errors against memory lengths into this file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find problems in the operands of a call; the exit code is 1 if results will be wrong. With --states, report for
    each head the error of storing states in fewer bits instead."""
    if states:
        _states(file, 1e-3 if within is None else within, 4096 if tokens is None else tokens, picture, as_json)
        return
    if (within, tokens, picture) != (None, None, None):
        raise GdnError("--within, --tokens and --picture are about states; give --states with them.")
    names, found = diagnose(file)
    errors = sum(finding.severity == "error" for finding in found)
    if as_json:
        print_json({"ok": not errors, "calls": names, "findings": [finding._asdict() for finding in found]})
    else:
        for finding in found:
            lead = Text(f"{finding.severity}: ", _COLOURS[finding.severity])
            console.print(lead.append(f"{finding.call}: {finding.what}.", "default"), soft_wrap=True)
            say(f"    {finding.why[0].upper()}{finding.why[1:]}{'' if finding.why.endswith('?') else '.'}", "dim")
        counts = {s: sum(finding.severity == s for finding in found) for s in _COLOURS}
        told = ", ".join(f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n) or "nothing will hurt"
        say(f"{len(names)} call{'' if len(names) == 1 else 's'} examined: {told}")
    if errors:
        raise typer.Exit(1)


def _states(file: Path, within: float, tokens: int, picture: Path | None, as_json: bool) -> None:
    choose_dtypes({dtype: [] for dtype in DTYPES}, within)  # says so at once if the error stated is none
    if picture is not None:
        check_target(picture)
    with progress_bar("states") as update:
        heads = of_file(file, tokens, update)
    chosen = _chosen(heads, within, DTYPES)
    if picture is not None:
        from ..harness.report.state_chart import state_chart

        write_whole(picture, state_chart(heads, within, f"{file.name}: states in few bits, {tokens} tokens"))
    share = sum(BYTES[dtype] for dtype in chosen) / (4 * len(chosen))
    pool = {dtype: all(head.errors[dtype] <= within for head in heads) for dtype in ("float32", "bfloat16")}
    if as_json:
        rows = [{**head._asdict(), "dtype": dtype} for head, dtype in zip(heads, chosen, strict=True)]
        print_json(finite({"within": within, "tokens": tokens, "heads": rows, "pool": pool, "share": share}))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("call", "head", "log decay", "memory", *DTYPES, f"within {within:g}"):
        table.add_column(name, justify="left" if name == "call" or name.startswith("within") else "right", no_wrap=True)
    for head, dtype in zip(heads, chosen, strict=True):
        errors = (f"{head.errors[name]:.1e}" for name in DTYPES)
        table.add_row(head.call, str(head.head), f"{head.decay:.3g}", f"{head.memory:.3g}", *errors, dtype)
    show(table)
    count = ", ".join(f"{chosen.count(dtype)} in {dtype}" for dtype in DTYPES if dtype in chosen)
    say(f"{len(heads)} head{'' if len(heads) == 1 else 's'} within {within:g}: {count}; at rest {share:.0%} of float32")
    verdict = "is within it for every head" if pool["bfloat16"] else "is not within it for every head; take float32"
    say(f"a pool of bfloat16 states {verdict}")
    if picture is not None:
        say(f"{picture}  errors over memory lengths")


def _chosen(heads: list[HeadStates], within: float, among: tuple[str, ...]) -> list[str]:
    return choose_dtypes({dtype: [head.errors[dtype] for head in heads] for dtype in among}, within, among)
