"""All commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from . import (
    bisect,
    capture,
    check,
    compare,
    doctor,
    generate,
    gpu_report,
    handover,
    info,
    interruption,
    port,
    record,
    tpu_report,
    verify,
)

__all__ = ["app"]

app = typer.Typer(
    name="portable-gdn",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One gated delta rule on GPU and TPU, and the proof that they agree.",
)


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"portable-gdn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """One gated delta rule on GPU and TPU, and the proof that they agree."""
    if context.invoked_subcommand in ("tpu-report", "gpu-report"):
        interruption.leaves("what was compiled until then may be kept for the next time, and nothing else was written")


app.command()(info.info)
app.command()(verify.verify)
app.command()(record.record)
app.command()(compare.compare)
app.command()(bisect.bisect)
app.command()(check.check)
app.command()(handover.handover)
app.command()(doctor.doctor)
app.command()(capture.capture)
app.command()(port.port)
app.command()(port.inspect)
app.command()(generate.generate)
app.command("tpu-report")(tpu_report.tpu_report)
app.command("gpu-report")(gpu_report.gpu_report)
