"""Shared output of the commands: text, tables, JSON, progress, and files that are written completely or not at all."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..harness.cases import Case
from ..harness.tensor_file import cannot_write
from ..spec.errors import bad
from . import interruption

__all__ = [
    "bytes_bar", "chosen", "console", "did_you_mean", "in_bytes", "messages", "plain_progress", "print_json",
    "progress_bar", "say", "say_verdict", "show", "times", "write_whole",
]  # fmt: skip

#: Width in columns of output to a pipe or a file, where no line is cut or wrapped.
UNBOUNDED = 10_000
#: Seconds between two lines of progress if there is no terminal for a bar.
EVERY = 10.0

#: Called with the name of the current item, the amount done, and the total, or None if that is not known.
Update = Callable[[str, int, int | None], None]

#: The markup that commands write themselves; any other bracket is plain text, such as in the name of an extra.
_OURS = re.compile(r"\[(?:green|yellow|dim|bold red)\][^\[\]]*\[/\]")
_BRACKET = re.compile(r"(?<!\\)\[")


class _Console(Console):
    """A console that interprets only the commands' own markup, and does not wrap lines in a pipe.

    Commands print names of files, extras, tensors and cases, and messages of other libraries. Brackets in these stay
    as they are, in lines and in tables.
    """

    def render_str(self, text: str, **more: Any) -> Text:
        """Return the text of a string, in which ``[green]holds[/]`` is green and ``[gpu]`` is plain text."""
        parts, end = [], 0
        for ours in _OURS.finditer(text):
            parts += [_BRACKET.sub(r"\\[", text[end : ours.start()]), ours.group()]
            end = ours.end()
        parts.append(_BRACKET.sub(r"\\[", text[end:]))
        return super().render_str("".join(parts), **more)

    @property
    def size(self) -> ConsoleDimensions:
        """The size of the terminal; without a terminal, and without COLUMNS, the width is practically unlimited."""
        if self.is_terminal or self._width is not None or "COLUMNS" in os.environ:
            return super().size
        return ConsoleDimensions(UNBOUNDED, 25)

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self._width, self._height = new


console = _Console(highlight=False, emoji=False)
messages = _Console(stderr=True, highlight=False, emoji=False)


def say(text: str, style: str | None = None) -> None:
    """Print one line that only the terminal may wrap; brackets in it are plain text."""
    console.print(Text(text), style=style, soft_wrap=True)


def say_verdict(holds: bool, sentence: str) -> None:
    """Print the last line of a check: "holds" or "fails", and a sentence."""
    line = Text("holds" if holds else "fails", "green" if holds else "bold red")
    console.print(line.append(f": {sentence}", "default"), soft_wrap=True)


def show(table: Table) -> None:
    """Print a table at its full width, so that names stay whole; a narrow terminal wraps its lines."""
    wide = console.options.update(max_width=UNBOUNDED)
    needs = console.measure(table, options=wide).maximum
    if needs <= console.width:
        console.print(table)
        return
    _Console(file=console.file, width=needs, highlight=False, emoji=False, force_terminal=console.is_terminal).print(
        table, crop=False
    )


def chosen(part: str | None, cases: Sequence[Case], what: str) -> list[Case]:
    """Return the cases whose name contains ``part``, or all cases if it is None.

    Args:
        part: The text to look for in the names.
        cases: The cases to choose from.
        what: A description of the names, for the error message, such as "a case's name".

    Raises:
        GdnError: No name contains ``part``; the message suggests similar names.
    """
    found = [case for case in cases if part is None or part in case.name]
    if part is not None and not found:
        raise bad("--case", repr(part), f"be part of {what}{did_you_mean(part, [case.name for case in cases])}")
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" for the end of a sentence, or "" if no known name is similar to ``word``."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), names, 3, 0.5)
    near += [name for name in names if word.lower() in name and name not in near][: 3 - len(near)]
    return f" (did you mean {' or '.join(repr(names[name]) for name in near)}?)" if near else ""


def times(n: int) -> str:
    """Return a count in words: "not at all", "once", "twice" or "3 times"."""
    return ("not at all", "once", "twice")[n] if n < 3 else f"{n} times"


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Show progress on standard error, as a bar or, without a terminal, as lines; yields ``update(what, done, of)``."""
    if not messages.is_terminal or messages.is_dumb_terminal:
        with plain_progress(title) as update:
            yield update
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def update(what: str, done: int, of: int | None) -> None:
            interruption.obey()
            progress.update(task, description=f"{title}  {what[:48]:48}", completed=done, total=of)

        yield update


@contextmanager
def plain_progress(title: str, figure: Callable[[int], str] = str, every: float | None = None) -> Iterator[Update]:
    """Print a line of progress on standard error every few seconds, also while a single item takes long.

    Args:
        title: The word that begins each line.
        figure: Formats the amount done and the total, for example as bytes.
        every: Seconds between two lines; ``EVERY`` if None.
    """
    started, over = time.monotonic(), threading.Event()
    at: list[tuple[str, int, int | None]] = []

    def lines() -> None:
        while not over.wait(EVERY if every is None else every):
            if at:
                what, done, of = at[-1]
                now = f": {what}" if what else ""
                whole = "" if of is None else f" of {figure(of)}"
                said = f"{title}: {figure(done)}{whole} done after {time.monotonic() - started:.0f} s{now}"
                messages.print(Text(said), soft_wrap=True)

    def update(what: str, done: int, of: int | None) -> None:
        interruption.obey()
        at[:] = [(what, done, of)]

    thread = threading.Thread(target=lines, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        over.set()
        thread.join()


@contextmanager
def bytes_bar(title: str) -> Iterator[Update]:
    """Show progress in bytes on standard error, as a bar or, without a terminal, as lines; yields ``update``."""
    if not messages.is_terminal or messages.is_dumb_terminal:
        with plain_progress(title, in_bytes) as update:
            yield update
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def update(what: str, done: int, of: int | None) -> None:
            interruption.obey()
            progress.update(task, description=f"{title}  {what[-40:]:40}", completed=done, total=of)

        yield update


def in_bytes(n: float) -> str:
    """Return a number of bytes in readable units, such as "340 B" or "1.2 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def write_whole(path: Path, text: str) -> None:
    """Write a text file completely or not at all, through a temporary file in the same folder that is then renamed.

    Raises:
        GdnError: The file cannot be written. The message names it and, on a full disk, the space that it needs.
    """
    data = text.encode()
    try:
        handle, name = tempfile.mkstemp(dir=path.parent or Path(), prefix=path.name, suffix=".part")
    except OSError as error:
        raise cannot_write(path, len(data), error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise cannot_write(path, len(data), error) from error
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
