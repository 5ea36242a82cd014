"""What served the calls that some code makes: a whole model's, say, whose calls nobody can ask ``explain`` about."""

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
    """A call and what computes it.

    Attributes:
        backend: its name; of a call that is traced by JAX what the compiled program holds, by platform: "pallas if
            compiled for a TPU, xla elsewhere".
        by: what of that backend (a library, a kernel and its plan), where it tells; of torchax what computes its JAX
            arrays, and where the call is traced what the compiled program holds.
        signature: the call.
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
    """Collect the calls of this process while the block runs, in their order.

        with pg.watch() as calls:
            model(x)
        print(*calls, sep="\\n")

    A compiled function makes its calls while it is traced and none when it runs again. Calls without a token are
    computed by no backend and are left out.

    Yields:
        The list, which grows.
    """
    calls: list[Served] = []
    _watching.append(calls)
    try:
        yield calls
    finally:
        _watching[:] = [kept for kept in _watching if kept is not calls]


def note(problem: Problem, backend: Backend) -> None:
    """Tell whoever watches."""
    if _watching:
        signature = problem.signature
        served = Served(where(backend, signature), backend.serves_call(problem), signature)
        for calls in _watching:
            calls.append(served)
