"""The comparison of a recorded run with a backend of this machine, or of two recorded runs, case by case.

Each side is first compared with the oracle, within the budget of its declared roundings. Then the difference between
the sides must be within 3 (u_a + E_a + u_b + E_b) plus the floors of both, per tensor and head. If the sides had inputs
of different dtypes, the change that this makes in the exact results is allowed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.precision import Rounding
from ..spec.problem import Signature
from .cases import Case, Inputs
from .compute import Outcome, Settings, each, tell, with_settings
from .judge import Expectation, Verdict, allowance, by_head, first_beyond, judge, only_bfloat16
from .parting import Run, by_stages
from .run_file import RunFile
from .stages import Parting, Side
from .statistics import MOST_NAMED, Statistics, and_list, statistics
from .truth import Truth

__all__ = [
    "CaseComparison",
    "Comparison",
    "SideFacts",
    "TensorComparison",
    "compare",
    "compare_case",
    "compare_recordings",
    "finite",
]


class SideFacts(NamedTuple):
    """The facts on one side: its name, its backend, when and where it ran, and with which settings."""

    label: str
    backend: str
    created: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    derived: tuple[str, ...]


class TensorComparison(NamedTuple):
    """One tensor of one case: the verdicts on both sides against the oracle, and the difference between the sides.

    Figures are those of the head that uses most of its budget, relative to that head's exact norm. ``judged`` is False
    if the case is too ill-conditioned to be judged; ``ok`` is then True. ``place`` is the index of the element in which
    the sides differ most, and ``values`` are both sides' values there and the exact one.
    """

    tensor: str
    a: Verdict
    b: Verdict
    difference: float
    expected: float
    budget: float
    ok: bool
    judged: bool
    head: int
    place: tuple[int, ...]
    values: tuple[float, float, float]
    note: str

    @property
    def holds(self) -> bool:
        """Whether both sides and their difference are within their budgets."""
        return self.ok and self.a.ok and self.b.ok

    @property
    def suspects(self) -> list[int]:
        """The sides whose errors need a closer look: 0 for a, 1 for b, or both if only the difference is too large."""
        bad = [i for i, verdict in enumerate((self.a, self.b)) if not verdict.ok]
        return bad or ([] if self.ok else [0, 1])


class CaseComparison(NamedTuple):
    """One case: its tensors, the statistics of both sides by tensor, and the comparison of the stages.

    ``errors`` are the relative (error, budget) of each side that was probed, by stage. ``parting`` is where the sides
    begin to differ or, if they agree, where one of them leaves the exact stages. ``remarks`` say what could not be
    compared, and why. ``served`` names the code that computed the case on each side, as in ``compute.Outcome``.
    """

    case: str
    variant: str
    tensors: list[TensorComparison]
    statistics: dict[str, tuple[Statistics, Statistics]]
    errors: dict[str, dict[str, tuple[float, float]]]
    parting: Parting | None
    apart: tuple[str, str]
    remarks: list[str]
    budgets: tuple[str, str]
    served: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def ok(self) -> bool:
        """Whether no tensor fails."""
        return all(t.holds for t in self.tensors)


@dataclass
class Comparison:
    """The result of a comparison: all cases, what was not compared, and the verdict."""

    a: SideFacts
    b: SideFacts
    cases: list[CaseComparison] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        """The number of tensors that were judged."""
        return sum(t.judged for case in self.cases for t in case.tensors)

    @property
    def equal(self) -> bool:
        """Whether at least one tensor was judged, none exceeds its budget, and no case failed to run."""
        return self.judged > 0 and not self.failed and all(case.ok for case in self.cases)

    def sentence(self) -> str:
        """The verdict as a sentence."""
        where = f"{self.a.label} and {self.b.label}"
        if not self.cases and not self.failed:
            return f"Nothing could be compared of {where}: that is a failure, not a pass."
        if not self.judged and not self.failed:
            return f"Nothing could be judged of {where}: every case is too ill-conditioned. That is no pass."
        left = len(self.not_compared)
        rest = "" if not left else f" {_count(left)} {'was' if left == 1 else 'were'} not compared."
        if self.equal:
            return f"Equal: {where} agree in {self.judged} results of {_count(len(self.cases))}.{rest}"
        bad = [case for case in self.cases if not case.ok]
        parts = [f"{len(bad)} of {_count(len(self.cases))} differ{'s' if len(bad) == 1 else ''}"] if bad else []
        parts += [f"{len(self.failed)} failed to run"] if self.failed else []
        at = next((case for case in bad if case.parting is not None), None)
        stage = "" if at is None or at.parting is None else f" They part {at.parting.brief(*at.apart)} ({at.case})."
        return f"Not equal: {where}: {' and '.join(parts)}.{stage}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON."""
        return {
            "equal": self.equal,
            "sentence": self.sentence(),
            "sides": [self.a._asdict(), self.b._asdict()],
            "cases": [_case_as_dict(case) for case in self.cases],
            "not_compared": self.not_compared,
            "failed": self.failed,
        }


def _count(cases: int) -> str:
    return f"{cases} case" if cases == 1 else f"{cases} cases"


def finite(x: Any) -> Any:
    """Replace numbers that are not finite, which JSON does not have, by strings."""
    if isinstance(x, float) and not np.isfinite(x):
        return str(x)
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    return [finite(value) for value in x] if isinstance(x, (list, tuple)) else x


def _case_as_dict(case: CaseComparison) -> dict[str, Any]:
    table = case._asdict() | {
        "ok": case.ok,
        "tensors": [t._asdict() | {"a": t.a._asdict(), "b": t.b._asdict()} for t in case.tensors],
        "statistics": {n: [x.as_dict() for x in pair] for n, pair in case.statistics.items()},
        "parting": None
        if case.parting is None
        else case.parting._asdict() | {"sentence": case.parting.sentence(*case.apart)},
    }
    return finite(table)


Progress = Callable[[str, int, int], None]


def compare(
    recording: RunFile,
    backend: Backend,
    settings: Settings,
    cases: Sequence[Case] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a recording with a backend on this machine, case by case.

    Args:
        recording: the recording.
        backend: the backend.
        settings: the settings for the backend; ``stages`` is taken from the recording.
        cases: some of the recording's cases; None takes all.
        progress: called with (description, number done, number of all).

    Raises:
        GdnError: the recording is damaged, or the backend computes none of its cases.
    """
    chosen = list(recording.cases) if cases is None else list(cases)
    # Results use the backend's own chunk size, and stages the recording's, so that all of them can be compared.
    size = settings.chunk_size or recording.stage_chunk
    settings = settings._replace(stages=recording.settings.stages, stage_chunk=size)
    recording.check(progress)
    result = Comparison(_recorded_side(recording), _own_side(backend, settings, {}))
    by_name = {case.name: case for case in chosen}
    mine = each(backend, chosen, settings, recording.inputs, recording.path)
    tell(progress, chosen, 0)
    for i, (outcome, facts) in enumerate(mine):
        result.b = result.b._replace(environment=facts)
        case = by_name[outcome.case]
        given = with_settings(recording.inputs(case), settings)
        _add(result, case, recording.outcome(case), outcome, recording.recorded_inputs(case), given)
        tell(progress, chosen, i + 1)
    return _something(result, recording, backend.name, len(chosen))


def compare_recordings(
    first: RunFile, second: RunFile, cases: Sequence[Case] | None = None, progress: Progress | None = None
) -> Comparison:
    """Compare two recordings on the cases that both contain.

    Args:
        first: one recording.
        second: the other recording.
        cases: some of their cases; None takes all that both contain.
        progress: called with (description, number done, number of all).

    Raises:
        GdnError: a recording is damaged, or they have no case in common.
    """
    chosen = list(first.cases) if cases is None else list(cases)
    first.check(progress)
    second.check(progress)
    result = Comparison(_recorded_side(first), _recorded_side(second))
    if result.a.label == result.b.label:
        result.b = result.b._replace(label=f"{result.b.label}, second")
    for i, case in enumerate(chosen):
        tell(progress, chosen, i)
        if case not in second.cases:
            result.not_compared[case.name] = f"{result.b.label}: it holds no such case"
            continue
        inputs = first.recorded_inputs(case), second.recorded_inputs(case)
        _add(result, case, first.outcome(case), second.outcome(case), *inputs)
    return _something(result, first, str(second.path), len(chosen))


def _something(result: Comparison, recording: RunFile, other: str, cases: int) -> Comparison:
    """Return the result, or raise an error if the other side computed none of the cases."""
    if not cases:
        raise GdnError(f"{recording.path}: the recording holds no cases.")
    lead = f"{result.b.label}: "
    refused = [why.removeprefix(lead) for why in result.not_compared.values() if why.startswith(lead)]
    if not result.cases and not result.failed and len(refused) == cases:
        raise GdnError(
            f"{recording.path}: {other!r} computes none of the {cases} cases of the recording: "
            f"{refused[0].rstrip('.')}."
        )
    return result


def _recorded_side(recording: RunFile) -> SideFacts:
    return SideFacts(
        f"{recording.backend} (recorded)", recording.backend, recording.created, recording.settings._asdict(),
        recording.environment, tuple(recording.derived),
    )  # fmt: skip


def _own_side(backend: Backend, settings: Settings, facts: dict[str, Any]) -> SideFacts:
    derived = backend.derived_stages
    return SideFacts(f"{backend.name} (here)", backend.name, "now", settings._asdict(), facts, derived)


def _add(result: Comparison, case: Case, a: Outcome, b: Outcome, inputs_a: Inputs, inputs_b: Inputs) -> None:
    """Compare one case, and add it to the result."""
    for side, outcome in ((result.a, a), (result.b, b)):
        if outcome.status == "refused":
            result.not_compared[case.name] = f"{side.label}: {outcome.why}"
            return
        if outcome.status == "failed":
            result.failed[case.name] = f"{side.label}: {outcome.why}"
            return
    result.cases.append(compare_case(case, a, b, inputs_a, inputs_b, result.a, result.b))


def compare_case(
    case: Case, a: Outcome, b: Outcome, inputs_a: Inputs, inputs_b: Inputs, side_a: SideFacts, side_b: SideFacts
) -> CaseComparison:
    """Compare two outcomes of one case."""
    same = all(
        np.array_equal(np.asarray(x, np.float64), np.asarray(inputs_b.operands[n], np.float64), equal_nan=True)
        for n, x in inputs_a.operands.items()
    ) and all(np.array_equal(x, inputs_b.cotangents[n]) for n, x in inputs_a.cotangents.items())
    truth_a = Truth(inputs_a)
    truth_b = truth_a if same and _dtype(inputs_a) == _dtype(inputs_b) else Truth(inputs_b)
    s = truth_a.problem.signature
    expected = truth_a.expectation(a.rounding), truth_b.expectation(b.rounding)
    rows, found = [], {}
    starts = inputs_a.operands.get("cu_seqlens")
    for tensor in expected[0].exact:
        rows.append(_row(tensor, a, b, expected, s))
        if tensor in a.tensors and tensor in b.tensors:
            pair = [
                statistics(tensor, outcome.tensors[tensor], e.exact[tensor], s, outcome.rounding.chunk_size, starts)
                for outcome, e in zip((a, b), expected, strict=True)
            ]
            x, y = pair
            if x is not None and y is not None:
                for verdict, outcome, e, told in zip(
                    (rows[-1].a, rows[-1].b), (a, b), expected, (x.findings, y.findings), strict=True
                ):
                    if not verdict.ok:
                        told[:0] = _beyond(tensor, outcome, e, s, starts)
                found[tensor] = (x, y)
    first, second = (
        Run(Side(facts.label, outcome.stages, outcome.rounding, facts.derived), outcome, inputs, e)
        for facts, outcome, inputs, e in zip((side_a, side_b), (a, b), (inputs_a, inputs_b), expected, strict=True)
    )
    stages = by_stages(first, second, s, same, all(row.holds for row in rows))
    budgets = (_provenance(a.rounding), _provenance(b.rounding))
    return CaseComparison(case.name, s.variant.name, rows, found, *stages, budgets, (a.served, b.served))


def _beyond(tensor: str, outcome: Outcome, e: Expectation, s: Signature, starts: np.ndarray | None) -> list[str]:
    """Write sentences on a tensor beyond its budget: the token it begins at, its heads, and what its values suggest."""
    value, exact = outcome.tensors[tensor], e.exact[tensor]
    place = first_beyond(tensor, value, e, s, starts)
    said = [] if place is None else [str(place)]
    if value.shape == exact.shape:
        error = by_head(tensor, np.asarray(value, np.float64) - exact, s)
        heads = np.flatnonzero(~(error <= allowance(tensor, error, e)[1])).tolist()
        if 1 < len(error) == len(heads):
            said.append(f"{'both' if len(heads) == 2 else f'all {len(heads)}'} heads are beyond their budgets")
        elif len(error) > 1 and 0 < len(heads) <= MOST_NAMED:
            which = f"head {heads[0]} is beyond its budget"
            which = which if len(heads) == 1 else f"heads {and_list(heads)} are beyond their budgets"
            said.append(f"{which}, of {len(error)}")
        elif len(error) > 1 and heads:
            said.append(f"{len(heads)} of {len(error)} heads are beyond their budgets, from {heads[0]} to {heads[-1]}")
        if only_bfloat16(np.asarray(value), exact):
            said.append("every value is one that bfloat16 can hold: it was rounded to bfloat16")
    return said


def _dtype(inputs: Inputs) -> Any:
    return next(inputs.operands[name].dtype for name in ("q", "qkv") if name in inputs.operands)


def _provenance(rounding: Rounding) -> str:
    """Describe the origin of a budget."""
    base = ", sums of decays in base 2" if rounding.base2 else ""
    return f"computed: declared roundings {rounding.describe()}, chunks of {rounding.chunk_size}{base}"


def _row(
    tensor: str,
    a: Outcome,
    b: Outcome,
    expected: tuple[Expectation, Expectation],
    s: Signature,
) -> TensorComparison:
    verdicts: list[Verdict] = []
    for outcome, e in zip((a, b), expected, strict=True):
        if tensor not in outcome.tensors:
            verdicts.append(Verdict(tensor, float("inf"), 0.0, 0.0, False, True, 0))
            continue
        verdict = judge(tensor, outcome.tensors[tensor], e, s)
        if not verdict.ok and outcome.known and np.isfinite(verdict.error):
            verdict = verdict._replace(ok=True, judged=False)
        verdicts.append(verdict)
    first, second = verdicts
    note = "; ".join(x.known for x, v in zip((a, b), verdicts, strict=True) if x.known and not v.judged)
    x, y = (outcome.tensors.get(tensor) for outcome in (a, b))
    if x is None or y is None or x.shape != y.shape:
        missing = f"missing on one side; {note}".rstrip("; ")
        return TensorComparison(
            tensor, first, second, float("inf"), 0.0, 0.0, False, True, 0, (), (np.nan, np.nan, np.nan), missing
        )
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    exact, other = (e.exact[tensor] for e in expected)
    error = by_head(tensor, x - y, s)
    allowed, budget = allowance(tensor, error, *expected, beside=by_head(tensor, exact - other, s))
    norm = by_head(tensor, exact, s)
    judged = all(v.judged for v in verdicts)
    if not x.size:  # a call without tokens
        return TensorComparison(
            tensor, first, second, 0.0, 0.0, 0.0, True, judged, 0, (), (np.nan, np.nan, np.nan), note
        )
    within = error <= budget
    with np.errstate(invalid="ignore", divide="ignore"):
        used = np.where(error == 0, 0.0, np.where(within | (error > budget), error / budget, np.inf))
    head = int(np.argmax(used))
    unit = norm[head] if norm[head] > 0 else 1.0
    off = np.abs(x - y)
    place = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), off.shape)
    return TensorComparison(
        tensor, first, second, float(error[head] / unit), float(allowed[head] / unit),
        float(budget[head] / unit), bool(np.all(within)) or not judged, judged, head, tuple(map(int, place)),
        (float(x[place]), float(y[place]), float(exact[place])), note,
    )  # fmt: skip
