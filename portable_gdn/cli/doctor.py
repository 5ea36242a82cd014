"""``portable-gdn doctor``: what will hurt in the operands that a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..harness.doctor import diagnose
from .output import console, print_json, say

__all__ = ["doctor"]

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def doctor(
    file: Annotated[Path, typer.Argument(help="A recording, or a safetensors file with q, k, v, g, beta.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Tell what will hurt in the operands of a call; exit code 1 if results will be wrong."""
    names, found = diagnose(file)
    errors = sum(finding.severity == "error" for finding in found)
    if as_json:
        print_json({"ok": not errors, "calls": names, "findings": [finding._asdict() for finding in found]})
    else:
        for finding in found:
            lead = Text(f"{finding.severity}: ", _COLOURS[finding.severity])
            console.print(lead.append(f"{finding.call}: {finding.what}.", "default"), soft_wrap=True)
            say(f"    {finding.why[0].upper()}{finding.why[1:]}{'' if finding.why.endswith('?') else '.'}", "dim")
        counts = {s: sum(finding.severity == s for finding in found) for s in _COLOURS}
        told = ", ".join(f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n) or "nothing will hurt"
        say(f"{len(names)} call{'' if len(names) == 1 else 's'} examined: {told}")
    if errors:
        raise typer.Exit(1)
