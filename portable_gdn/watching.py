"""A record of which backends computed the calls of some code, such as a whole model, which ``explain`` cannot reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .dispatch import where
from .spec.backend import Backend
from .spec.problem import Problem, Signature

__all__ = ["Served", "note", "watch"]

_watching: list[list[Served]] = []


class Served(NamedTuple):
    """A call and the backend that computes it.

    Attributes:
        backend: The name of the backend. For a call that JAX traces it may depend on the platform that the program is
            compiled for, as in "pallas if compiled for a TPU, xla elsewhere".
        by: The part of the backend that computes the call (a library, or a kernel and its plan), or "". For torchax it
            is what computes its JAX arrays, and for a traced call what the compiled program holds.
        signature: The metadata of the call.
    """

    backend: str
    by: str
    signature: Signature

    def __str__(self) -> str:
        s = self.signature
        call = "step" if s.step else "rule" if s.conv is None else "mixer"
        shape = f"B={s.B} T={s.T} N={s.N} H={s.H} HV={s.HV} K={s.K} V={s.V}"
        by = f": {self.by}" if self.by else ""
        return f"{s.variant.name} {call}, {s.dtype}, {s.precision}, {shape} on {self.backend}{by}"


@contextmanager
def watch() -> Iterator[list[Served]]:
    """Collect the calls that this process makes while the block runs, in order.

        with pg.watch() as calls:
            model(x)
        print(*calls, sep="\\n")

    A compiled function makes its calls when it is traced, and none when it runs again. Calls without tokens are left
    out, since no backend computes them.

    Yields:
        A list of ``Served``, which grows with each call.
    """
    calls: list[Served] = []
    _watching.append(calls)
    try:
        yield calls
    finally:
        _watching[:] = [kept for kept in _watching if kept is not calls]


def note(problem: Problem, backend: Backend) -> None:
    """Add a call to the list of every active ``watch`` block."""
    if _watching:
        signature = problem.signature
        served = Served(where(backend, signature), backend.serves_call(problem), signature)
        for calls in _watching:
            calls.append(served)
