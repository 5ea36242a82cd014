"""``portable-gdn gpu-report``: the resources that FLA's kernels need, from the GPU's compiler run on this CPU."""

from __future__ import annotations

from typing import Annotated

import typer

from ..gpu.compiling.targets import TARGETS
from ..harness.gpu_report import gpu_reports
from ..harness.shapes import OPERATIONS, VARIANTS, Shape
from ..spec.errors import GdnError
from .output import console, print_json, progress_bar

__all__ = ["gpu_report"]


def gpu_report(
    arch: Annotated[str, typer.Option(help=f"The GPU: {', '.join(TARGETS)} or all.")] = "sm_90",
    op: Annotated[
        str, typer.Option(help=f"Operations, separated by commas: {', '.join(OPERATIONS)}.")
    ] = "forward,backward",
    variant: Annotated[str, typer.Option(help=f"Rules, separated by commas: {', '.join(VARIANTS)}.")] = "gdn,kda",
    groups: Annotated[int, typer.Option(help="Number of decays per head, for --variant grouped.")] = Shape().groups,
    precision: Annotated[str | None, typer.Option(help="Precision: fast, default or highest.")] = None,
    no_l2norm: Annotated[bool, typer.Option("--no-l2norm", help="Do not normalise q and k.")] = False,
    batch: Annotated[int, typer.Option(help="Batch size.")] = Shape().batch,
    seqlen: Annotated[int, typer.Option(help="Tokens per sequence.")] = Shape().seqlen,
    heads: Annotated[int, typer.Option(help="Number of key heads.")] = Shape().heads,
    value_heads: Annotated[
        int | None, typer.Option(help="Number of value heads; equal to the key heads if not given.")
    ] = None,
    key_dim: Annotated[int, typer.Option(help="Size of a key head.")] = Shape().key_dim,
    value_dim: Annotated[int, typer.Option(help="Size of a value head.")] = Shape().value_dim,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v.")] = Shape().dtype,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="Report every configuration that autotuning would try.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile the kernels that a GPU would launch, without a GPU; report registers, spills and shared memory."""
    archs = list(TARGETS) if arch == "all" else [arch]
    shape = Shape(
        batch, seqlen, heads, heads if value_heads is None else value_heads, key_dim, value_dim, dtype, groups
    )
    with progress_bar("compile") as update:
        update(" ".join(archs), 0, None)
        found = gpu_reports(
            _words(op),
            _words(variant),
            shape,
            archs,
            precision=precision,
            l2norm=not no_l2norm,
            all_configs=all_configs,
            progress=lambda name: update(name, 0, None),
        )
    reports = [r for r in found if not isinstance(r, GdnError)]
    failed = {name: r for name, r in zip(archs, found, strict=True) if isinstance(r, GdnError)}
    if not reports:
        raise next(iter(failed.values()))
    if as_json and arch != "all":
        print_json(reports[0].as_dict())
    elif as_json:
        print_json({"reports": [r.as_dict() for r in reports], "failed": {name: str(e) for name, e in failed.items()}})
    else:
        for report in reports:
            console.print(str(report), markup=False, soft_wrap=True)
        for name, error in failed.items():
            console.print(f"{name}: {error}", markup=False)
    if any(k.failed for r in reports for k in r.kernels) or failed:
        raise typer.Exit(1)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",")))
