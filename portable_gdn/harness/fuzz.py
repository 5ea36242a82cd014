"""Long runs of random cases against one backend, limited by number or time, with a seed and reproducible failures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from .. import dispatch
from ..spec.backend import Backend
from ..spec.errors import GdnError
from .cases import Case
from .properties import PROPERTIES, Refused, Violation, Void, attempt, cases

__all__ = ["Failure", "Fuzzed", "check", "fuzz", "reproducer"]


class Failure(NamedTuple):
    """A property that does not hold, with the smallest failing case found."""

    backend: str
    property: str
    case: Case
    sentence: str


@dataclass
class Fuzzed:
    """The result of a run: how many cases held or were refused for each property, the failures, and the seconds taken.

    ``asked`` are the properties that the run was asked to draw cases for.
    """

    backend: str
    seed: int
    asked: tuple[str, ...] = ()
    held: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def tried(self) -> int:
        """The number of cases that ran."""
        return self.held.total() + self.refused.total() + len(self.failures)

    @property
    def not_drawn(self) -> list[str]:
        """The properties that were asked for but not tried on a single case, so that nothing is known about them."""
        failed = {failure.property for failure in self.failures}
        return [name for name in self.asked if not (self.held[name] or self.refused[name] or name in failed)]

    @property
    def not_computed(self) -> list[str]:
        """The properties for which the backend refused every case that was drawn."""
        failed = {failure.property for failure in self.failures}
        return [name for name in self.asked if self.refused[name] and not self.held[name] and name not in failed]

    def sentence(self) -> str:
        """Return what was found and what was not tried, as a phrase that follows the word "holds" or "fails"."""
        if not self.held and not self.failures:
            return "nothing was computed"
        failures = len(self.failures)
        said = (
            f"{self.tried} case{'' if self.tried == 1 else 's'} on {self.backend} in {self.seconds:.0f} s, seed "
            f"{self.seed}: {failures} failure{'' if failures == 1 else 's'}, {self.refused.total()} refused"
        )
        if self.not_computed:
            said += f", and of {', '.join(self.not_computed)} all that was drawn"
        if self.not_drawn:
            said += f"; not drawn, and so not checked: {', '.join(self.not_drawn)}"
        return said + ("; interrupted" if self.interrupted else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON."""
        return {
            "backend": self.backend,
            "seed": self.seed,
            "tried": self.tried,
            "held": dict(self.held),
            "refused": dict(self.refused),
            "not_drawn": self.not_drawn,
            "not_computed": self.not_computed,
            "sentence": self.sentence(),
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
    """Draw cases for each property in turn until there are enough, the time is up, or the user interrupts the run.

    Equal seeds and numbers of cases draw equal cases. Each property gets an equal share of them. Every round draws
    cases for each property; rounds begin small and grow to ``batch`` cases per property, so that a short run also
    reaches all properties. Cases to which a property does not apply are drawn again and do not count.

    When a property fails, its case is shrunk to the smallest failing one, and the property is not tried again.

    Args:
        backend: the name of the backend.
        cases: the number of cases of all properties together.
        seconds: the time limit, or None.
        seed: the seed of the random cases.
        properties: the names of the properties; None takes all.
        batch: the largest number of cases per property and round.
        progress: called with (description, number done, number of all).

    Raises:
        GdnError: hypothesis is not installed, or there is no such backend or property.
    """
    names = list(dict.fromkeys(PROPERTIES if properties is None else properties))
    for name in names:
        if name not in PROPERTIES:
            raise GdnError(f"property is {name!r}; it must be one of {', '.join(PROPERTIES)}.")
    why = dispatch.get(backend).unavailable()
    if why is not None:
        raise GdnError(f"backend {backend!r} cannot run here: {why}")
    found, started, number = Fuzzed(backend, seed, tuple(names)), time.perf_counter(), 0

    def over() -> bool:
        return found.tried >= cases or (seconds is not None and time.perf_counter() - started >= seconds)

    try:
        while names and not over():
            most = min(batch, FIRST_ROUND << min(number, 20))
            turns = list(names)
            for i, name in enumerate(turns):
                if over():
                    break
                if progress is not None:
                    progress(name, min(found.tried, cases), cases)
                left = cases - found.tried
                count = min(most, -(-left // (len(turns) - i)))
                if not _batch(found, name, count, seed + number, over, progress, cases):
                    names.remove(name)
            number += 1
    except KeyboardInterrupt:  # keep what was found so far
        found.interrupted = True
    found.seconds = time.perf_counter() - started
    return found


#: The number of cases per property in the first round; each later round has twice as many, up to a batch.
FIRST_ROUND = 10

Progress = Callable[[str, int, int], None]


def _batch(
    found: Fuzzed, name: str, count: int, seed: int, over: Callable[[], bool], progress: Progress | None, of: int
) -> bool:
    """Try some cases of one property, and return whether all hold; ``progress`` is told of ``of`` cases in total."""
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
        if not failing and over():  # in the middle of a batch
            return
        try:
            attempt(found.backend, name, case)
        except Void:
            hypothesis.reject()
        except Refused:
            table = found.refused
        except Exception as error:  # a backend that fails violates every property
            failing.append((case, error))
            raise
        else:
            table = found.held
        if not failing:  # cases tried while shrinking do not count
            table[name] += 1
            if progress is not None:
                progress(name, min(found.tried, of), of)

    try:
        run()
    except hypothesis.errors.Unsatisfiable:  # the property applies to no case that can be drawn
        return True
    except Exception:
        if not failing:
            raise
        case, error = failing[-1]  # hypothesis ends with the smallest
        sentence = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        found.failures.append(Failure(found.backend, name, case, sentence))
        return False
    return True


def reproducer(failure: Failure, folder: Path) -> Path:
    """Write a file that reproduces the failure with ``python FILE``, and return its path."""
    plain = Case("drawn")
    said = ", ".join(
        f"{f.name}={getattr(failure.case, f.name)!r}"
        for f in fields(Case)
        if f.name == "name" or getattr(failure.case, f.name) != getattr(plain, f.name)
    )
    folder.mkdir(parents=True, exist_ok=True)
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


def check(backend: Backend | str, examples: int = 25, seed: int = 0, properties: Any = None) -> Counter[str]:
    """Test a backend on ``examples`` random cases for every property.

    Args:
        backend: the name of a backend, or an instance, which is then registered for this process.
        examples: the number of cases per property.
        seed: the seed of the random cases.
        properties: the names of properties; None takes all.

    Returns:
        The number of cases that the backend computed, by property.

    Raises:
        Violation: a property does not hold. The properties are tried in the order of ``PROPERTIES``, and the exception
            has the smallest failing case that was found.
        GdnError: hypothesis is not installed, or the backend computes nothing at all.
    """
    if not isinstance(backend, str):
        dispatch.register_backend(backend)
        backend = backend.name
    names = list(PROPERTIES if properties is None else properties)
    found = fuzz(backend, cases=examples * len(names), seed=seed, properties=names, batch=examples)
    for failure in found.failures:
        raise Violation(f"{failure.property}: {failure.sentence}\n{failure.case!r}")
    if not found.held.total():
        raise GdnError(f"backend {backend!r} computes none of the calls that were drawn.")
    return found.held
