"""Run one backend's cases in a child process (``serve.py``), and read its answers as they come.

This is for a backend that must choose its interpreter before a library is imported, or that may crash its process. The
child gets its cases as JSON on standard input, and answers with one JSON object per line; everything that libraries
print goes to standard error. If the child ends early, all cases that it has not answered fail.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .cases import Case

__all__ = ["Worker"]


class Worker:
    """A child process that runs cases on one backend. Iterate over ``answers`` for its results; ``close`` ends it."""

    def __init__(
        self,
        backend: str,
        cases: Sequence[Case],
        task: str = "verify",
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """Start the child process.

        Args:
            backend: the name of the backend.
            cases: the cases to run.
            task: the task of ``serve.py`` for each case.
            environment: additional environment variables for the child.
            more: arguments of the task.
        """
        self.backend, self.cases = backend, list(cases)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "portable_gdn.harness.serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        recipes = [asdict(case) for case in self.cases]
        order = json.dumps({"task": task, "backend": backend, "cases": recipes, **more})
        threading.Thread(target=self._talk, args=(order,), daemon=True).start()

    def _talk(self, order: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(order)
            self._process.stdin.close()
        except OSError:
            pass  # the child has ended; that is handled below
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield one answer per case and, if the child ended early, {"ended": why, "left": cases} at the end."""
        left = [case.name for case in self.cases]
        while (line := self._lines.get()) is not None:
            answer = json.loads(line)
            if answer["case"] in left:
                left.remove(answer["case"])
            yield answer
        code = self._process.wait()
        if left or code:
            yield {"ended": f"its process ended with {_ending(code)}{self._last_words()}", "left": left}

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()}" if lines else ""

    def close(self) -> None:
        """End the child if it is still running."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._errors.close()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
