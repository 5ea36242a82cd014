"""All commands, put together."""

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

__all__ = ["EXAMPLES", "app"]

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


#: A line of each command that does something useful, shown below its help.
EXAMPLES = {
    "info": "",
    "verify": "-b xla --full",
    "record": "-b fla --suite standard --stages -o gpu.safetensors",
    "compare": "gpu.safetensors -b pallas --report out.html",
    "bisect": "gpu.safetensors -b pallas",
    "check": "-b mine --cases 5000",
    "handover": "states.safetensors -b pallas",
    "doctor": "operands.safetensors",
    "capture": "recordings -m qwen3_next",
    "port": "Qwen3-Next-80B-A3B-Instruct out --to jax --check",
    "inspect": "Qwen3-Next-80B-A3B-Instruct",
    "generate": "out --prompt 'Once upon a time' --max-new-tokens 64",
    "tpu-report": "--chip v6e --seqlen 8192 --value-heads 32",
    "gpu-report": "--arch sm_90",
}

_COMMANDS: dict[str, Callable[..., Any]] = {
    "info": info.info,
    "verify": verify.verify,
    "record": record.record,
    "compare": compare.compare,
    "bisect": bisect.bisect,
    "check": check.check,
    "handover": handover.handover,
    "doctor": doctor.doctor,
    "capture": capture.capture,
    "port": port.port,
    "inspect": port.inspect,
    "generate": generate.generate,
    "tpu-report": tpu_report.tpu_report,
    "gpu-report": gpu_report.gpu_report,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, epilog=f"Example: portable-gdn {_name} {EXAMPLES[_name]}".rstrip())(_command)
