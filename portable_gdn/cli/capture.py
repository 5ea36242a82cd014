"""``portable-gdn capture``: record what reaches the rule inside real model layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..harness.capture import MODELS
from ..harness.capture import capture as run
from ..spec.errors import bad
from .output import console, print_json

__all__ = ["capture"]


def capture(
    out: Annotated[Path, typer.Argument(help="Folder for the recordings.")],
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Only this model; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Run tiny models of transformers on text and write the rule's operands and their own results as safetensors."""
    if not out.is_dir():
        raise bad("OUT", str(out), "be a folder that exists")
    for name in model or []:
        if name not in MODELS:
            raise bad("--model", repr(name), f"be one of {', '.join(MODELS)}")
    written = [run(name, out) for name in model or MODELS]
    if as_json:
        print_json({"files": [str(path) for path in written]})
    else:
        for path in written:
            console.print(f"{path}  {path.stat().st_size} bytes")
