"""Many drawn cases against one backend, for a night: so many, in so much time, by a seed; failures reproduced."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from .. import dispatch
from ..spec.errors import GdnError
from .cases import Case
from .properties import PROPERTIES, cases, hold

__all__ = ["Failure", "Fuzzed", "fuzz", "reproducer"]


class Failure(NamedTuple):
    """A property that does not hold, with the smallest case found."""

    backend: str
    property: str
    case: Case
    sentence: str


@dataclass
class Fuzzed:
    """What was tried: cases that held and cases that the backend refused, by property; failures; seconds."""

    backend: str
    seed: int
    held: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def tried(self) -> int:
        """Cases that ran."""
        return self.held.total() + self.refused.total() + len(self.failures)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "backend": self.backend,
            "seed": self.seed,
            "tried": self.tried,
            "held": dict(self.held),
            "refused": dict(self.refused),
            "failures": [{"property": f.property, "sentence": f.sentence, "case": repr(f.case)} for f in self.failures],
            "seconds": round(self.seconds, 1),
            "interrupted": self.interrupted,
        }


def fuzz(
    backend: str,
    cases: int = 1000,
    seconds: float | None = None,
    seed: int = 0,
    properties: Sequence[str] | None = None,
    batch: int = 100,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fuzzed:
    """Draw cases for each property in turn until there are enough, the time is up, or somebody interrupts it.

    The same seed draws the same cases.

    A property that fails is shrunk to its smallest case and left alone from then on.

    Raises:
        GdnError: hypothesis is not installed, or there is no such backend or property here.
    """
    names = list(PROPERTIES if properties is None else properties)
    for name in names:
        if name not in PROPERTIES:
            raise GdnError(f"property is {name!r}; it must be one of {', '.join(PROPERTIES)}.")
    why = dispatch.get(backend).unavailable()
    if why is not None:
        raise GdnError(f"backend {backend!r} cannot run here: {why}")
    found, started, turn = Fuzzed(backend, seed), time.perf_counter(), 0
    while names and found.tried < cases and (seconds is None or time.perf_counter() - started < seconds):
        name = names[turn % len(names)]
        if progress is not None:
            progress(name, min(found.tried, cases), cases)
        count = min(batch, cases - found.tried)
        try:
            holds = _batch(found, name, count, seed + turn // len(names))
        except KeyboardInterrupt:  # what was found until then is worth having
            found.interrupted = True
            break
        if holds:
            turn += 1
        else:
            names.remove(name)
    found.seconds = time.perf_counter() - started
    return found


def _batch(found: Fuzzed, name: str, count: int, seed: int) -> bool:
    """Some cases of one property; whether all hold."""
    try:
        import hypothesis
    except ImportError:
        raise GdnError("hypothesis is not installed; `pip install 'portable-gdn[check]'` brings it.") from None
    failing: list[tuple[Case, Exception]] = []
    slow = dispatch.get(found.backend).slow

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip
    @hypothesis.given(cases(few_shapes=slow))
    def run(case: Case) -> None:
        try:
            computed = hold(found.backend, name, case)
        except Exception as error:  # a backend that breaks violates every property
            failing.append((case, error))
            raise
        if not failing:  # what shrinking tries does not count
            (found.held if computed else found.refused)[name] += 1

    try:
        run()
    except Exception:
        if not failing:
            raise
        case, error = failing[-1]  # hypothesis ends with the smallest
        sentence = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        found.failures.append(Failure(found.backend, name, case, sentence))
        return False
    return True


def reproducer(failure: Failure, folder: Path) -> Path:
    """One file that shows the failure again: ``python FILE``."""
    plain = Case("drawn")
    said = ", ".join(
        f"{f.name}={getattr(failure.case, f.name)!r}"
        for f in fields(Case)
        if f.name == "name" or getattr(failure.case, f.name) != getattr(plain, f.name)
    )
    path = folder / f"{failure.backend}-{failure.property}.py".replace(" ", "-")
    first = failure.sentence.splitlines()[0] if failure.sentence else "it fails"
    path.write_text(
        f'"""{failure.property} does not hold on {failure.backend}: {first}"""\n\n'
        "from portable_gdn.harness.cases import Case\n"
        "from portable_gdn.harness.properties import hold\n\n"
        f"hold({failure.backend!r}, {failure.property!r}, Case({said}))\n"
        'print("it holds")\n',
        encoding="utf-8",
    )
    return path
