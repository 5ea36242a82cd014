"""Ctrl-C: the first one ends a command, even if a library swallows it, and one sentence says what was left behind.

This module imports only small modules of the standard library, so that it works while all others are being imported.
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
    """Remember interruptions from now on, and deliver one again if a callback of a library swallowed it.

    Python prints and drops exceptions that are raised in a destructor or in a callback of the garbage collector, so a
    compiler with such callbacks would run on.
    """
    before = sys.unraisablehook

    def interrupted(number: int, frame: Any) -> None:
        global _interrupted
        _interrupted = True
        raise KeyboardInterrupt

    def unraisable(what: Any) -> None:
        if what.exc_type is not None and issubclass(what.exc_type, KeyboardInterrupt):
            # Deliver it later, from another thread: raised here, it would be lost again.
            again = threading.Timer(0.05, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            before(what)

    signal.signal(signal.SIGINT, interrupted)
    sys.unraisablehook = unraisable


def obey() -> None:
    """Raise KeyboardInterrupt if an interruption came and was swallowed; call this between pieces of work."""
    if _interrupted:
        raise KeyboardInterrupt


def leaves(sentence: str) -> None:
    """Set what a command says if it is interrupted from now on: what it has concluded and written so far."""
    global _leaves
    _leaves = sentence


def was_said(end: SystemExit) -> bool:
    """Return whether a command that ended with code 130 has itself said what it left behind.

    Typer, too, turns an interruption into exit code 130, but prints nothing.
    """
    return not isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt)


def over() -> None:
    """Say what was left behind, and ignore further interruptions so that the process ends in peace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"portable-gdn: interrupted; {_leaves}.", file=sys.stderr)
