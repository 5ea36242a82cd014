"""The command line application: all commands, with an example below the help of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

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

__all__ = ["COMMANDS", "app"]

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
        interruption.leaves("what was compiled so far may be cached for the next run, and nothing else was written")


#: Every command, and the arguments of an example that is shown below its help.
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "info": (info.info, ""),
    "verify": (verify.verify, "-b xla --full"),
    "record": (record.record, "-b fla --suite standard --stages -o gpu.safetensors"),
    "compare": (compare.compare, "gpu.safetensors -b pallas --report out.html"),
    "bisect": (bisect.bisect, "gpu.safetensors -b pallas"),
    "check": (check.check, "-b mine --cases 5000"),
    "handover": (handover.handover, "states.safetensors -b pallas"),
    "doctor": (doctor.doctor, "operands.safetensors"),
    "capture": (capture.capture, "recordings -m qwen3_next"),
    "port": (port.port, "Qwen3-Next-80B-A3B-Instruct out --to jax --check"),
    "inspect": (port.inspect, "Qwen3-Next-80B-A3B-Instruct"),
    "generate": (generate.generate, "out --prompt 'Once upon a time' --max-new-tokens 64"),
    "tpu-report": (tpu_report.tpu_report, "--chip v6e --seqlen 8192 --value-heads 32"),
    "gpu-report": (gpu_report.gpu_report, "--arch sm_90"),
}
for _name, (_command, _example) in COMMANDS.items():
    app.command(_name, epilog=f"Example: portable-gdn {_name} {_example}".rstrip())(_command)
