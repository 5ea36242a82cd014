"""``portable-gdn compare``: compare a recording with a backend of this machine, or with another recording."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..harness.compare import Comparison, TensorComparison, compare_recordings
from ..harness.compare import compare as run
from ..harness.compute import Settings, backend_for, one_thread
from ..harness.run_file import RunFile, check_target
from ..spec.errors import GdnError
from .output import chosen, console, print_json, progress_bar, say, show, write_whole

__all__ = ["compare"]


def compare(
    recording: Annotated[Path, typer.Argument(help="A file that `portable-gdn record` wrote.")],
    other: Annotated[Path | None, typer.Argument(help="A second recording, used instead of a backend.")] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", metavar="NAME", help="The backend to compare the recording with.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this file, as JSON.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Compare only cases whose name contains this text.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of the backend: fast, default or highest.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Tokens per chunk on the backend.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast q, k and v to this dtype for the backend.")] = None,
    emulate: Annotated[
        str | None, typer.Option(help="Round as a TPU does at this precision: fast, default or highest.")
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Print every tensor of every case.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say whether two machines, or two backends, computed equal results; exit with code 1 if not."""
    for path in (report, output):
        if path is not None:
            check_target(path)
    settings = Settings(precision, chunk_size, dtype, False, emulate)
    if (backend is None) == (other is None):
        raise GdnError("give either --backend or a second recording to compare with.")
    if other is not None and settings != Settings():
        raise GdnError("two recordings are compared as they were recorded, without --precision and the like.")
    own = None if backend is None else backend_for(backend, settings)
    file = RunFile(recording)
    cases = chosen(case, file.cases, "the name of a recorded case")
    one_thread()
    with progress_bar("compare") as update:
        if own is not None:
            found = run(file, own, settings, cases, update)
        else:
            assert other is not None
            found = compare_recordings(file, RunFile(other), cases, update)
    if report is not None:
        from ..harness.report.page import page  # which imports a template engine

        write_whole(report, page(found))
    if output is not None:
        write_whole(output, json.dumps(found.as_dict(), indent=1))
    if as_json:
        print_json(found.as_dict())
    else:
        print_comparison(found, all_rows)
    if not found.equal:
        raise typer.Exit(1)


def _figure(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"


def print_comparison(found: Comparison, all_rows: bool) -> None:
    """Print a table of results, then what differs, then the verdict.

    The table has one row per tensor, for the case that uses most of its budget, or with ``all_rows`` every tensor of
    every case. The column ``expected`` is the larger of the two sides' expected errors.
    """
    rows = [(case.case, t) for case in found.cases for t in case.tensors]
    if not all_rows:
        worst: dict[str, tuple[str, TensorComparison]] = {}
        for name, t in rows:
            if t.tensor not in worst or _share(t) > _share(worst[t.tensor][1]):
                worst[t.tensor] = (name, t)
        rows = [worst[name] for name in sorted(worst)]
    narrow = console.width < 110
    table = Table(
        title=f"a: {found.a.label}   b: {found.b.label}   relative errors against the oracle and between a and b",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    for name in ("tensor", "a", "b", "expected", "a - b", "budget", ""):
        table.add_column(name, justify="left" if name in ("tensor", "") else "right", no_wrap=True)
    if not narrow:
        table.add_column("case", no_wrap=True, overflow="ellipsis")
    for name, t in rows:
        table.add_row(
            t.tensor, _figure(t.a.error), _figure(t.b.error), _figure(max(t.a.expected, t.b.expected)),
            _figure(t.difference), _figure(t.budget), _verdict(t), *([] if narrow else [name]),
        )  # fmt: skip
    show(table)
    for case in found.cases:
        if not case.ok:
            parts = ", ".join(t.tensor for t in case.tensors if not t.holds)
            say(f"  DIFFERS: {case.case}: {parts}")
            if case.parting is not None:
                say(f"    {case.parting.sentence(*case.apart)}")
            for t in case.tensors:
                for i in t.suspects if t.tensor in case.statistics else ():
                    for finding in case.statistics[t.tensor][i].findings:
                        say(f"    {t.tensor} of {(found.a, found.b)[i].label}: {finding}")
    remarks = Counter(remark for case in found.cases if not case.ok for remark in case.remarks)
    for remark, count in remarks.items():
        say(f"  {'in 1 case' if count == 1 else f'in {count} cases'}: {remark}")
    for title, why in (("not compared", found.not_compared), ("FAILED", found.failed)):
        for name, reason in why.items():
            say(f"  {title}: {name}: {reason}")
    ill = sorted({case.case for case in found.cases for t in case.tensors if not t.judged})
    if ill:
        say(f"  not judged, ill-conditioned or known: {', '.join(ill)}")
    say(found.sentence(), "green" if found.equal else "bold red")


def _verdict(t: TensorComparison) -> str:
    if not t.holds:
        at = "a" if not t.a.ok else "b" if not t.b.ok else "a - b"
        return f"[bold red]DIFFERS[/] ({at})"
    return "[green]equal[/]" if t.judged else "[yellow]not judged[/]"


def _share(t: TensorComparison) -> float:
    if not t.holds:
        return float("inf")
    return t.difference / t.budget if t.budget else 0.0
