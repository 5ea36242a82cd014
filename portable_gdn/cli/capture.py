"""``portable-gdn capture``: record the operands that the layers of real models pass to the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..harness.capture import MODELS
from ..harness.capture import capture as run
from ..spec.errors import bad
from . import interruption
from .output import did_you_mean, print_json, progress_bar, say

__all__ = ["capture"]


def capture(
    out: Annotated[Path, typer.Argument(help="Folder for the recordings; created if missing.")],
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="NAME", help="Run only this model; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Run tiny transformers models on text; write the rule's operands and the models' own results as safetensors."""
    if out.exists() and not out.is_dir():
        raise bad("OUT", f"{out}, which is no folder", "be a folder, or a name for one that is made")
    names = list(dict.fromkeys(model or MODELS))
    for name in names:
        if name not in MODELS:
            raise bad("--model", repr(name), f"be one of {', '.join(MODELS)}{did_you_mean(name, MODELS)}")
    written: list[Path] = []
    with progress_bar("capture") as update:
        for i, name in enumerate(names):
            update(name, i, len(names))
            written.append(run(name, out))
            files = ", ".join(path.name for path in written)
            interruption.leaves(f"{files} {'is' if i == 0 else 'are'} complete in {out}; no other file was written")
    if as_json:
        print_json({"files": [str(path) for path in written]})
    else:
        for path in written:
            say(f"{path}  {path.stat().st_size} bytes")
