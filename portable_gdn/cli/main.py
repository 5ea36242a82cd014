"""The command ``portable-gdn``. Exit codes: 0 holds, 1 a check failed, 2 the input is wrong, 130 interrupted."""

from __future__ import annotations

import sys

import typer

from ..spec.errors import GdnError
from . import bisect, capture, check, compare, doctor, gpu_report, handover, info, port, record, tpu_report, verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="portable-gdn",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="One gated delta rule on GPU and TPU, and the proof that they agree.",
)
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
app.command("tpu-report")(tpu_report.tpu_report)
app.command("gpu-report")(gpu_report.gpu_report)


def main() -> None:
    """Run the command line; errors of the caller become a sentence and exit code 2."""
    try:
        app()
    except GdnError as error:
        print(f"portable-gdn: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # which typer makes of a KeyboardInterrupt, without a word
            print("portable-gdn: interrupted; nothing was concluded, and nothing was written.", file=sys.stderr)
        raise
    except OSError as error:
        print(f"portable-gdn: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
        sys.exit(2)
