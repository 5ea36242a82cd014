"""What commands share: where things are printed, JSON, progress, files written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["console", "messages", "print_json", "progress_bar", "write_whole"]

console = Console(highlight=False)
messages = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """JSON on standard output, nothing else."""
    print(json.dumps(value, indent=1, allow_nan=False))


@contextmanager
def progress_bar(title: str) -> Iterator[Any]:
    """A bar on standard error; yields ``update(what, done, of)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def update(what: str, done: int, of: int) -> None:
            progress.update(task, description=f"{title}  {what[:48]:48}", completed=done, total=of)

        yield update


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is either there whole or not there: beside it first, then renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent or Path(), prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
