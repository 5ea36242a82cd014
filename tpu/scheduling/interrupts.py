"""Keeps an interrupt that comes where Python cannot raise it, as in the callback of JAX's garbage collection."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interruptible"]

SECONDS = 0.01  # until an interrupt that was lost is raised anew: behind the callback in which it was


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block the first Ctrl-C ends it, wherever it comes.

    Python drops what is raised in callbacks of its garbage collection, of weak references and in ``__del__``, with a
    note on standard error. JAX has such a callback, and tracing collects often. Here the note of a lost
    KeyboardInterrupt is an order to raise it again. In threads other than the main one nothing is done: no interrupt
    reaches them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook
    over = threading.Event()

    def hook(lost: Any) -> None:
        if lost.exc_type is None or not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        threading.Thread(target=again, daemon=True).start()

    def again() -> None:
        if not over.wait(SECONDS):
            _thread.interrupt_main()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        over.set()
        sys.unraisablehook = before
