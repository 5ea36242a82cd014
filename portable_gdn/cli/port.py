"""``portable-gdn port`` and ``portable-gdn inspect``: convert checkpoints from one format to another, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from ..checkpoint import porting, proof, provenance
from ..checkpoint.families import ALL
from ..checkpoint.report import describe_plan
from ..checkpoint.targets import TARGETS
from ..checkpoint.targets.maxtext import LAYOUTS, layout_of
from ..spec.errors import bad
from .output import bytes_bar, console, in_bytes, messages, print_json, progress_bar, show

__all__ = ["inspect", "port"]

_Family = Annotated[
    str | None,
    typer.Option("--family", help="Read the tensors as this model family's; otherwise recognised by their names."),
]
_Base = Annotated[
    Path | None,
    typer.Option(help="For a LoRA adapter: the base model, as a folder with config.json or as that file itself."),
]
_Dequantise = Annotated[
    bool,
    typer.Option(
        "--dequantise",
        help="Turn FP8, int8, NVFP4 or MXFP4 weights into bfloat16 (or --dtype) with their scales; not reversible.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
_To = Annotated[str, typer.Option("--to", help=f"The format to write: {', '.join(TARGETS)}.")]


def inspect(
    source: Annotated[Path, typer.Argument(help="A folder with safetensors files, a single such file, or a port.")],
    to: _To = "jax",
    family: _Family = None,
    base: _Base = None,
    dequantise: _Dequantise = False,
    as_json: _Json = False,
) -> None:
    """Show what a checkpoint contains and what each tensor would become; only headers are read."""
    if source.is_dir() and provenance.is_port(source):
        facts = provenance.load(source)
        if as_json:
            print_json(facts)
        else:
            _print_port(facts)
        return
    facts = describe_plan(porting.plan_of(source, to, family=family, base=base, dequantise=dequantise))
    if as_json:
        print_json(facts)
    else:
        _print_plan(facts)


def port(
    source: Annotated[Path, typer.Argument(help="The checkpoint, or a port with --back or --check.")],
    out: Annotated[Path | None, typer.Argument(help="The folder to write; it must not exist.")] = None,
    to: Annotated[str | None, typer.Option("--to", help=f"The format to write: {', '.join(TARGETS)}.")] = None,
    back: Annotated[
        bool, typer.Option("--back", help="Write the original checkpoint of a port again, byte for byte.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    family: _Family = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast weights to bfloat16, float32 or float16; 8-bit weights get their scales applied."),
    ] = None,
    base: _Base = None,
    dequantise: _Dequantise = False,
    layout: Annotated[
        str | None,
        typer.Option(help=f"The layout of MaxText's layers, which depends on its release: {', '.join(LAYOUTS)}."),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A MaxText checkpoint whose layout is used, instead of --layout.")
    ] = None,
    shard_size: Annotated[float, typer.Option(help="The largest size of a file, in GB.")] = porting.SHARD / 1e9,
    allow_overflow: Annotated[
        bool, typer.Option("--allow-overflow", help="With --dtype: let values that are too large become infinite.")
    ] = False,
    lossy: Annotated[
        bool, typer.Option(help="With --back: accept the rounding of a port that was cast to a smaller dtype.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check a port against the original code: its bytes, its layers and its whole model."
        ),
    ] = False,
    original: Annotated[
        Path | None,
        typer.Option("--source", help="With --check: the original checkpoint, if it has moved since the port."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", "-b", help="With --check: the backend to run the port on, xla by default; may be repeated."
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint in another format; --back restores the original of a port, and --check checks a port."""
    if dequantise and (check or back):
        raise bad("--dequantise", "given together with --back or --check", "be given where a checkpoint is ported")
    if check:
        if back or to is not None or out is not None or dry_run:
            raise bad("--check", "given together with --to, --back, --dry-run or a folder to write", "stand alone")
        _check(source, original, backend or ["xla"], as_json)
        return
    if not shard_size > 0:
        raise bad("--shard-size", shard_size, "be positive")
    if back == (to is not None):
        raise bad("--to", to if to is not None else "not given", "be given, or --back instead of it")
    if out is None and not dry_run:
        raise bad("OUT", "not given", "be the folder to write")
    if like is not None:
        if layout is not None or to != "maxtext":
            raise bad("--like", str(like), "be given with --to maxtext and without --layout")
        layout = layout_of(like)
    target = out if out is not None else Path("out")
    if dry_run and not back:
        facts = describe_plan(
            porting.plan_of(
                source, str(to), family=family, dtype=dtype, layout=layout, base=base, dequantise=dequantise
            )
        )
        print_json(facts) if as_json else _print_plan(facts)
        return
    said: tuple[str, ...] = ()  # before anything is written
    with nullcontext() if dry_run else _resumable(), bytes_bar("back" if back else "port") as update:
        if back:
            outcome = porting.back(
                source, target, lossy=lossy, allow_overflow=allow_overflow, progress=update, dry_run=dry_run
            )
        else:
            plan = porting.plan_of(
                source,
                str(to),
                family=family,
                dtype=dtype,
                layout=layout,
                base=base,
                dequantise=dequantise,
                out=target,
            )
            said = plan.notes
            if not as_json:
                _say_notes(said)
            outcome = porting.write(plan, target, int(shard_size * 1e9), update, allow_overflow)
    facts = {
        "out": str(outcome.out), "files": outcome.files, "tensors": outcome.tensors, "bytes": outcome.nbytes,
        "resumed_files": outcome.resumed, "changed": outcome.changed, "beside": outcome.beside,
        "edited": outcome.edited, "overflow": outcome.overflow, "notes": list(outcome.notes),
    }  # fmt: skip
    if as_json:
        print_json(facts)
        return
    _say_notes(tuple(note for note in outcome.notes if note not in said))
    done = "would be in" if dry_run else "read back, compared by hash, and now in"
    console.print(f"{outcome.tensors} tensors, {in_bytes(outcome.nbytes)}, {done} {outcome.out}", markup=False)
    if back and not dry_run:
        same = outcome.tensors - len(outcome.changed)
        console.print(f"{same} of {outcome.tensors} have the bytes that were ported")
    if outcome.changed:
        _names("changed" if back else "cast", outcome.changed)
    if outcome.beside:
        _names("files beside them, as they are", outcome.beside, _FILES)
    if outcome.edited:
        _names("of these, no longer as they were ported", outcome.edited, _FILES)


def _say_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False)


def _check(port: Path, source: Path | None, backends: list[str], as_json: bool) -> None:
    with progress_bar("check") as update:
        report = proof.check(port, source, backends=backends, progress=update)
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: proof.Report) -> None:
    kinds: dict[str, int] = {}
    for how in report.tensors.values():
        kinds[how] = kinds.get(how, 0) + 1
    console.print(f"{len(report.tensors)} tensors of {report.source}, by what the way back would give:", markup=False)
    for how, count in kinds.items():
        console.print(f"  {count:6} {_HOW.get(how, how)}", markup=False)
    for sentence in report.wrong[:8]:
        console.print(f"  FAILS: {sentence}", markup=False)
    if len(report.wrong) > 8:
        console.print(f"  FAILS: and {len(report.wrong) - 8} more")
    table = _table("backend", "original", "what", "worst error", "limit", "in layer", "")
    groups: dict[tuple[str, str, str], list[proof.Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.backend, finding.code, finding.what), []).append(finding)
    for (backend, code, what), found in groups.items():
        worst = max(found, key=lambda f: f.error if f.error == f.error else float("inf"))
        verdict = "[green]holds[/]" if all(f.ok for f in found) else "[bold red]FAILS[/]"
        where = "-" if worst.layer is None else f"{worst.layer} of {len(found)}"
        table.add_row(backend, code, what, f"{worst.error:.1e}", f"{worst.limit:.0e}", where, verdict)
    if groups:
        show(table)
    if report.not_whole is not None and report.unrun is None:
        console.print(f"no whole model was compared: {report.not_whole}", markup=False)
    if report.unrun is not None:
        console.print(f"not run: {report.unrun}", markup=False)
    console.print("[green]holds[/]" if report.ok else "[bold red]fails[/]")


_HOW = {
    "bytes": "with the source's bytes and dtype",
    "bytes, and run": "with the source's bytes and dtype, and run in a layer beside the original's",
    "differs": "that differ",
}


@contextmanager
def _resumable() -> Iterator[None]:
    """Say after Ctrl-C that the same command continues the port."""
    try:
        yield
    except KeyboardInterrupt:
        messages.print("portable-gdn: interrupted; the same command continues after the last finished file.")
        raise typer.Exit(130) from None


_FILES = 24  # named in a line


def _names(title: str, names: list[str], most: int = 4) -> None:
    some = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    console.print(f"{title}: {some}", markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("tensors", "size") else "left")
    return table


def _print_plan(facts: dict[str, Any]) -> None:
    console.print(
        f"{facts['title']} ({facts['family']}), {in_bytes(facts['source_bytes'])} in {facts['source']}", markup=False
    )
    console.print(", ".join(f"{dim} = {n}" for dim, n in facts["sizes"].items()), markup=False)
    console.print(f"linear attention in {len(facts['linear_layers'])} layers; mixer: {facts['mixer']}", markup=False)
    table = _table("tensor", "tensors", "dtype", "shape", "size", f"in {facts['target']}")
    for row in facts["tensors"]:
        table.add_row(
            row["source"], str(row["count"]), row["dtype"], row["shape"].replace("[", r"\["), in_bytes(row["bytes"]),
            "\n".join(row["becomes"]),
        )  # fmt: skip
    show(table)
    console.print(
        f"{facts['target']}: {sum(o['count'] for o in facts['outputs'])} tensors, {in_bytes(facts['target_bytes'])}; "
        f"side file {in_bytes(facts['side_bytes'])}",
        markup=False,
    )
    for group in facts["aside"]:
        _names(f"side file, {group['rule']}", group["names"])
    if facts["beside"]:
        _names("files beside the tensors, carried as they are", [file["name"] for file in facts["beside"]], _FILES)
    for name, (was, becomes) in facts["casts"].items():
        console.print(f"cast: {name} from {was} to {becomes}", markup=False)
    for note in facts["notes"]:
        console.print(f"note: {note}", markup=False)


def _print_port(facts: dict[str, Any]) -> None:
    families = {family.name: family.title for family in ALL}
    console.print(
        f"a port to {facts['target']} of {facts['source']['path']}, {families.get(facts['family'], facts['family'])}",
        markup=False,
    )
    console.print(
        f"{len(facts['tensors'])} tensors in {', '.join([*facts['files'], *facts['side_files']])}", markup=False
    )
    for rule, names in facts["aside"].items():
        _names(f"side file, {rule}", names)
    if facts["source"].get("beside"):
        _names("files beside the tensors, carried as they are", list(facts["source"]["beside"]), _FILES)
    for name, (was, becomes) in facts["casts"].items():
        console.print(f"cast: {name} from {was} to {becomes}", markup=False)
    for note in facts.get("notes", ()):
        console.print(f"note: {note}", markup=False)
