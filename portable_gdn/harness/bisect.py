"""The comparison of two backends, or of a recording and a backend, stage by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..spec.backend import Backend
from .cases import Case, Inputs, build
from .compare import CaseComparison, SideFacts, compare_case, finite
from .compute import CHUNK, Outcome, Settings, each, tell, with_settings
from .run_file import RunFile
from .statistics import and_list

__all__ = ["Bisected", "bisect"]


def _unseen(case: CaseComparison) -> str:
    """Explain how the results of a case can differ although its stages do not."""
    wrong = [t.tensor for t in case.tensors if not t.holds]
    lead = f"no stage parts, and yet {and_list(wrong)} {'does' if len(wrong) == 1 else 'do'}"
    if all(tensor.startswith("grad_") for tensor in wrong):
        return f"{lead}: what differs lies in the backward pass, or behind or before the stages"
    return f"{lead}: what differs lies behind or before the stages"


@dataclass
class Bisected:
    """The result for each case: the stage at which the sides begin to differ, if they do; and what was not compared."""

    a: str
    b: str
    cases: list[CaseComparison] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def agree(self) -> bool:
        """Whether the stages of at least one case were compared, and all stages and results agree."""
        return any(case.errors for case in self.cases) and all(case.parting is None and case.ok for case in self.cases)

    def lines(self) -> Iterator[str]:
        """Yield a line for each case whose sides differ, for each remark, and for each case left out."""
        for case in self.cases:
            if case.parting is not None:
                yield f"{case.case}: {case.parting.sentence(*case.apart)}"
            elif not case.ok:
                yield f"{case.case}: {_unseen(case)}"
        for remark, count in Counter(remark for case in self.cases for remark in case.remarks).items():
            where = next(case.case for case in self.cases if remark in case.remarks)
            yield f"{where if count == 1 else f'in {count} cases'}: {remark}"
        for name, why in self.skipped.items():
            yield f"not compared: {name}: {why}"

    def sentence(self) -> str:
        """The verdict as a sentence."""
        probed = sum(bool(case.errors) for case in self.cases)
        if not probed:
            return f"No stages of {self.a} and {self.b} could be compared: that is a failure, not a pass."
        if self.agree:
            return f"{self.a} and {self.b} agree at every stage of {probed} cases."
        apart = [case for case in self.cases if case.parting is not None or not case.ok]
        stages = sorted({case.parting.stage for case in apart if case.parting is not None})
        where = " or ".join(stages) or "no stage"
        return f"{self.a} and {self.b} part in {len(apart)} of {len(self.cases)} cases, first at {where}."

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON."""
        return {
            "agree": self.agree,
            "sentence": self.sentence(),
            "cases": [
                {
                    "case": case.case,
                    "ok": case.ok,
                    "parting": None
                    if case.parting is None
                    else {**finite(case.parting._asdict()), "sentence": case.parting.sentence(*case.apart)},
                    "errors": finite(case.errors),
                    "remarks": case.remarks,
                }
                for case in self.cases
            ],
            "skipped": self.skipped,
        }


def bisect(
    first: Backend | RunFile,
    second: Backend,
    cases: Sequence[Case],
    settings: Settings,
    progress: Callable[[str, int, int], None] | None = None,
) -> Bisected:
    """Compare the stages of two sides case by case.

    Args:
        first: a backend, or a recording.
        second: the backend to compare with it.
        cases: the cases to compare.
        settings: the settings for both sides. If they have no chunk size, that of the recording is used.
        progress: called with (description, number done, number of all).

    Raises:
        GdnError: a recording is damaged.
    """
    settings = settings._replace(stages=True)
    if isinstance(first, RunFile):
        first.check(progress)
        inputs: Callable[[Case], Inputs] = first.inputs
        a = SideFacts(f"{first.backend} (recorded)", first.backend, "", {}, {}, tuple(first.derived))
        theirs: Iterator[Outcome] = map(first.outcome, cases)
        settings = settings._replace(stage_chunk=settings.chunk_size or first.stage_chunk)
    else:
        settings = settings._replace(stage_chunk=settings.chunk_size or CHUNK)
        inputs = build
        a = SideFacts(first.name, first.name, "", {}, {}, first.derived_stages)
        theirs = (outcome for outcome, _ in each(first, cases, settings._replace(emulate=None)))
    b = SideFacts(second.name, second.name, "", {}, {}, second.derived_stages)
    if a.label == b.label:
        b = b._replace(label=f"{b.label} (second)")
    found = Bisected(a.label, b.label)
    path = first.path if isinstance(first, RunFile) else None
    mine = each(second, cases, settings, inputs, path)
    tell(progress, cases, 0)
    for i, (case, x, (y, _)) in enumerate(zip(cases, theirs, mine, strict=True)):
        for side, outcome in ((a, x), (b, y)):
            if outcome.status != "done":
                found.skipped[case.name] = f"{side.label}: {outcome.why}"
                break
        else:
            given = first.recorded_inputs(case) if isinstance(first, RunFile) else with_settings(build(case), settings)
            found.cases.append(compare_case(case, x, y, given, with_settings(inputs(case), settings), a, b))
        tell(progress, cases, i + 1)
    return found
