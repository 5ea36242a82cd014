"""``portable-gdn tpu-report``: the cost of the rule on a TPU, by the TPU's compiler running on this CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from ..harness.layer_report import DIRECTIONS, SCOPES, LayerShape
from ..harness.scale_report import SPLITS, ScaleShape
from ..harness.tpu_report import OPERATIONS, VARIANTS, Shape, TpuReport, tpu_reports
from ..spec.errors import GdnError, bad
from ..tpu.chips import CHIPS, chip_named
from ..tpu.scheduling.build import expected_wait, missing
from ..tpu.scheduling.picture import picture as draw
from .output import console, messages, print_json, progress_bar, show
from .tpu_layers import report_layers
from .tpu_scale import report_scale

__all__ = ["tpu_report"]


def tpu_report(
    chip: Annotated[str, typer.Option(help=f"The TPU: {', '.join(CHIPS)}, or all.")] = "v6e",
    op: Annotated[str, typer.Option(help=f"The operation: {', '.join((*OPERATIONS, *SCOPES))}.")] = "forward",
    direction: Annotated[str, typer.Option(help=f"For --op layer or mixer: {' or '.join(DIRECTIONS)}.")] = "forward",
    hidden_size: Annotated[int, typer.Option(help="For --op layer or mixer: size of the layer's input.")] = 2048,
    backend: Annotated[str, typer.Option(help="For --op layer or mixer: the backend, pallas or xla.")] = "pallas",
    norm: Annotated[bool, typer.Option(help="For --op mixer: include the output norm and gate.")] = True,
    variant: Annotated[str, typer.Option(help=f"The rule: {', '.join(VARIANTS)}.")] = "gdn",
    groups: Annotated[int, typer.Option(help="Number of decays per head, for --variant grouped.")] = Shape().groups,
    fused: Annotated[
        bool, typer.Option(help="Compute the mixer: include the convolution, the l2norm and the gates.")
    ] = False,
    precision: Annotated[str | None, typer.Option(help="Precision: fast, default or highest.")] = None,
    batch: Annotated[int, typer.Option()] = Shape().batch,
    seqlen: Annotated[int, typer.Option()] = Shape().seqlen,
    heads: Annotated[int, typer.Option(help="Number of key heads.")] = Shape().heads,
    value_heads: Annotated[
        int | None, typer.Option(help="Number of value heads; equal to the key heads if not given.")
    ] = None,
    key_dim: Annotated[int, typer.Option()] = Shape().key_dim,
    value_dim: Annotated[int, typer.Option()] = Shape().value_dim,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v.")] = Shape().dtype,
    sequences: Annotated[
        int, typer.Option(help="Number of packed sequences in the row, each with its own state.")
    ] = Shape().sequences,
    picture: Annotated[Path | None, typer.Option(help="Draw how busy each unit is during a grid step, as SVG.")] = None,
    chips: Annotated[int, typer.Option(help="Compile for this number of chips: 2, 4, 8 or another power of two.")] = 1,
    split: Annotated[str, typer.Option(help=f"With --chips: what to split over them: {', '.join(SPLITS)}.")] = "rows",
    forgets: Annotated[
        bool, typer.Option(help="With --split tokens: assume gates that forget everything before a piece.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compile again, even if an earlier report is stored.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile the rule's TPU kernels, without a TPU, and report cycles, use of each unit, spills and memory traffic.

    With --op layer, report a whole layer and how its time divides; with --op mixer, the part between its projections.
    With --chips, split the work over many chips, and report its collectives and the predicted efficiency.
    """
    kinds = list(CHIPS) if chip == "all" else [chip]
    HV = heads if value_heads is None else value_heads
    shape = Shape(batch, seqlen, heads, HV, key_dim, value_dim, dtype, groups, sequences)
    wait = None if missing() else expected_wait(kinds)
    if wait is not None:
        messages.print(wait, soft_wrap=True)
    if picture is not None and (op in SCOPES or chip == "all" or chips != 1):
        raise bad(
            "--picture",
            picture,
            "be left out of --op layer and mixer, --chips and --chip all: it shows one call's kernels",
        )
    if fused and (op in SCOPES or chips != 1):
        where = f"--op {op}, which has everything in it" if op in SCOPES else "a call with --chips"
        raise bad("--fused", "given", f"be left out of {where}")
    if chips != 1:
        if op not in ("forward", "backward", "layer") or backend != "pallas":
            raise bad("--op", f"{op} on {backend}", "be forward, backward or layer, on pallas, with --chips")
        what, way = ("layer", direction) if op == "layer" else ("rule", "forward" if op == "forward" else "train")
        scale = ScaleShape(what, variant, way, shape, split, chips, precision, hidden_size, forgets)
        report_scale(scale, kinds, not no_cache, as_json)
        return
    if op in SCOPES:
        layer = LayerShape(op, variant, direction, hidden_size, shape, precision, backend, norm)
        report_layers(layer, kinds, not no_cache, as_json)
        return
    with progress_bar("compile") as update:
        update(" ".join(kinds), 0, len(kinds))
        found = tpu_reports(
            op, variant, shape, kinds, precision=precision, fused=fused, use_cache=not no_cache, progress=update
        )
    reports = [r for r in found if isinstance(r, TpuReport)]
    failed = [(name, r) for name, r in zip(kinds, found, strict=True) if isinstance(r, GdnError)]
    if not reports:
        raise failed[0][1]
    if picture is not None:
        picture.write_text(draw(reports[0].schedule))
    if as_json and chip != "all":
        print_json(reports[0].as_dict())
    elif as_json:
        print_json({"reports": [r.as_dict() for r in reports], "failed": {name: str(e) for name, e in failed}})
    elif chip != "all":
        _print(reports[0])
    else:
        _compare(reports, failed)


def _print(report: TpuReport) -> None:
    console.print(str(report.schedule), markup=False, soft_wrap=True)
    each = report.cycles_per_head_128
    if each is not None:
        console.print(f"{each:.0f} cycles per value head and 128 tokens")
    if report.plan:
        console.print(f"plan: {report.plan}", markup=False, soft_wrap=True)


_COLUMNS = ("chip", "cycles", "head, 128", "ms", "floor", "bound", "MXU", "spills", "VMEM", "beside")


def _compare(reports: list[TpuReport], failed: list[tuple[str, GdnError]]) -> None:
    s = reports[0].shape
    table = Table(
        title=f"{reports[0].variant} {reports[0].op}, B={s.batch} T={s.seqlen} heads {s.heads}/{s.value_heads} "
        f"dims {s.key_dim}/{s.value_dim} {s.dtype}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("chip", "bound") else "right", no_wrap=True)
    for report in reports:
        table.add_row(*_row(report))
    show(table)
    console.print(
        "cycles: of the kernels, and for each value head and 128 tokens; ms: the longer of code and HBM traffic; "
        "floor: the busiest unit alone, or the traffic, ms; spills: registers stored a step; VMEM: MiB; beside: ms of "
        "what XLA runs around the kernels. The two cores of v4 and v5p work on a call together."
    )
    for name, error in failed:
        console.print(f"{name}: {error}", markup=False)


def _row(report: TpuReport) -> list[str]:
    schedule = report.schedule
    chip = chip_named(schedule.chip)
    kernels: Any = schedule.kernels
    milliseconds = lambda t: "?" if t is None else f"{t * 1e3:.3f}"  # noqa: E731
    cycles = schedule.cycles or 0
    mxu = sum(k.units.get("MXU", 0.0) * (k.times or 0) for k in kernels)
    return [
        schedule.chip,
        "?" if schedule.cycles is None else f"{cycles:,}",
        "?" if report.cycles_per_head_128 is None else f"{report.cycles_per_head_128:.0f}",
        milliseconds(schedule.seconds),
        milliseconds(schedule.floor_seconds),
        ", ".join(dict.fromkeys(k.bound(chip) for k in kernels)),
        f"{100 * mxu / cycles:.0f} %" if cycles else "?",
        str(sum(k.spills for k in kernels)),
        f"{max((k.vmem_bytes for k in kernels), default=0) / 2**20:.1f}",
        milliseconds(schedule.other_seconds),
    ]
