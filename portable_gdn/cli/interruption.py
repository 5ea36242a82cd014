"""Ctrl-C: the first one ends a command, whoever swallows it, and what it left is said in one true sentence.

Imports nothing but the standard library's smallest modules, so that it works while everything else is being imported.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from typing import Any

__all__ = ["install", "leaves", "obey", "over", "was_said"]

_interrupted = False
_leaves = "nothing was concluded, and nothing was written"


def install() -> None:
    """From now on an interruption is remembered, and delivered again where a callback of a library swallowed it.

    Python prints and drops what is raised inside a callback of the garbage collector or a destructor: a compiler that
    has such callbacks would run on.
    """
    before = sys.unraisablehook

    def interrupted(number: int, frame: Any) -> None:
        global _interrupted
        _interrupted = True
        raise KeyboardInterrupt

    def unraisable(what: Any) -> None:
        if what.exc_type is not None and issubclass(what.exc_type, KeyboardInterrupt):
            # Later, from another thread: raised here it would be lost once more.
            again = threading.Timer(0.05, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            before(what)

    signal.signal(signal.SIGINT, interrupted)
    sys.unraisablehook = unraisable


def obey() -> None:
    """Called between pieces of work: raise KeyboardInterrupt if one came and this piece went on as if none had."""
    if _interrupted:
        raise KeyboardInterrupt


def leaves(sentence: str) -> None:
    """What a command says if it is interrupted from now on: what is concluded, and what is written by then."""
    global _leaves
    _leaves = sentence


def was_said(end: SystemExit) -> bool:
    """Whether a command that ended with 130 caught the interruption, and said what it left, by itself.

    Typer makes exit code 130 of an interruption, too, without a word.
    """
    return not isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt)


def over() -> None:
    """Say what was left; from now on nothing disturbs the end of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"portable-gdn: interrupted; {_leaves}.", file=sys.stderr)
