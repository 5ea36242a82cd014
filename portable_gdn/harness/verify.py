"""The proof on one machine: it compares every backend that runs here with the oracle, on every case.

Outputs, states and gradients are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .. import dispatch
from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.precision import Rounding
from ..spec.problem import Signature
from .cases import Case, Inputs, build, designed, pairwise, recorded, strengths
from .compute import Settings, one
from .devices import WAYS, environment_of, split_name
from .grouping import Group, groups
from .judge import Expectation, first_beyond, judge, only_bfloat16
from .quick_proof import in_quick_proof
from .row import Row
from .truth import Truth
from .worker import Worker

__all__ = ["NotRun", "Report", "Row", "cases_for", "verify"]


class NotRun(NamedTuple):
    """A backend, and perhaps a case, that was not compared, and the reason."""

    backend: str
    case: str
    why: str


@dataclass
class Report:
    """The report of a proof: all its rows, what was not run, and the verdict."""

    rows: list[Row] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether at least one tensor was judged, and all that were judged are within their budgets."""
        return any(row.judged for row in self.rows) and all(row.ok for row in self.rows)

    def groups(self) -> list[Group]:
        """The failures, grouped by likely cause."""
        return groups(self.rows, self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {
            "ok": self.ok,
            "groups": [
                {
                    "backend": group.backend,
                    "tensors": group.tensors,
                    "cases": group.failing,
                    "cause": group.cause,
                    "first": group.first,
                    "sentence": group.sentence(),
                }
                for group in self.groups()
            ],
            "results": [row.as_dict() for row in self.rows],
            "not_run": [item._asdict() for item in self.not_run],
            "seconds": self.seconds,
        }


def cases_for(full: bool) -> list[Case]:
    """Return the cases of the quick proof, or of the full one."""
    return [*designed(), *recorded(), *([*pairwise(), *strengths()] if full else [])]


Progress = Callable[[str, int, int], None]


def verify(
    names: Sequence[str] | None = None,
    full: bool = False,
    cases: Sequence[Case] | None = None,
    progress: Progress | None = None,
    in_process: bool = False,
    spread: bool = False,
    devices: int | None = None,
) -> Report:
    """Run the proof: compare backends with the oracle, case by case.

    Args:
        names: the names of the backends; None takes all that run on this machine.
        full: run all cases on every backend, including the pairwise plan and every strength of the finer gates.
        cases: the cases to run instead of those of the quick or the full proof.
        progress: called with (description, number done, number of all).
        in_process: run backends in this process that would otherwise get a process of their own.
        spread: run backends that XLA interprets on a CPU in a process of their own, too, with fewer compiler
            optimisations.
        devices: split every call over rows, heads or tokens among at most this many virtual CPU devices, in processes
            that have them. ``names`` must then be backends for JAX arrays; None means ``xla``.

    Returns:
        The report.

    Raises:
        GdnError: a backend does not exist or cannot run here.
    """
    report = Report()
    cases = report.cases = cases_for(full) if cases is None else list(cases)
    if devices is not None:
        chosen = [dispatch.get(name) for name in dict.fromkeys(names or ["xla"])]
        for backend in chosen:
            if "jax" not in backend.libraries:
                raise GdnError(f"backend {backend.name!r} takes no JAX arrays, which are what --devices splits.")
        where = environment_of(devices)
        workers = [
            Worker(
                split_name(backend.name, way),
                [case for case in cases if full or in_quick_proof(backend, case)],
                environment=where,
                full=True,  # the cases are chosen here
                split=backend.name,
                devices=devices,
            )
            for backend in chosen
            for way in WAYS
        ]
        _collect(report, [], workers, full, progress)
        return report
    chosen = list(_chosen(names, report))
    eased = INTERPRETED if spread else ()
    apart = [b for b in chosen if not in_process and (b.own_process or b.name in eased)]
    together = [backend for backend in chosen if backend not in apart]
    workers = [
        Worker(
            backend.name,
            [case for case in cases if full or in_quick_proof(backend, case)],
            environment=_less_trouble() if backend.name in eased else None,
            full=full,
        )
        for backend in apart
    ]
    _collect(report, together, workers, full, progress)
    return report


def _collect(
    report: Report, together: list[Backend], workers: list[Worker], full: bool, progress: Progress | None
) -> None:
    """Run the report's cases on some backends in this process, and collect the answers of the workers."""
    cases = report.cases
    total = (len(cases) if together else 0) + sum(len(worker.cases) for worker in workers)
    done = 0
    try:
        for case in cases if together else []:
            if progress is not None:
                progress(case.name, done, total)
            _run_case(case, together, full, report)
            done += 1
        for worker in workers:
            for case in cases:
                if case not in worker.cases:
                    report.not_run.append(NotRun(worker.backend, case.name, LEFT))
            for answer in worker.answers():
                _take(answer, worker.backend, report)
                done += 1
                if progress is not None:
                    progress(f"{worker.backend}: {answer.get('case', '')}", min(done, total), total)
    finally:
        for worker in workers:
            worker.close()
    if progress is not None:
        progress("", total, total)


#: Backends whose kernels are meant for another device and run on a CPU only for the proof. The optimisation of the
#: interpreter is not part of the proof, and without it the proof takes half the time.
INTERPRETED = ("pallas-interpret",)
RECORDED = "transformers"  # the library whose results the recordings of layers contain
ONLY_BFLOAT16 = "every value is one that bfloat16 can hold: it was rounded to bfloat16"
LEFT = "left to --full: each new shape costs it seconds"


def _less_trouble() -> dict[str, str]:
    """Return environment variables that turn optimisations of XLA's CPU compiler off, unless a level was asked for."""
    flags = os.environ.get("XLA_FLAGS", "")
    level = "--xla_backend_optimization_level"
    return {} if level in flags else {"XLA_FLAGS": f"{flags} {level}=0".strip()}


def _take(answer: dict[str, Any], backend: str, report: Report) -> None:
    """Put a worker's answer into the report."""
    if "ended" in answer:
        for case in answer["left"] or ["all"]:
            report.rows.append(Row(backend, case, "all", float("inf"), 0.0, 0.0, False, True, 0, answer["ended"]))
        return
    for row in answer["rows"]:
        for name in ("error", "expected", "budget"):
            row[name] = float(row[name])
        if row["backend"] == backend:  # the worker has already judged the recordings
            report.rows.append(Row(**row))
    report.not_run += [NotRun(**item) for item in answer["not_run"]]
    for name, seconds in answer["seconds"].items():
        report.seconds[name] = report.seconds.get(name, 0.0) + seconds


def _chosen(names: Sequence[str] | None, report: Report) -> Iterator[Backend]:
    if names is None:
        for backend in dispatch.backends():
            why = backend.not_here()
            if why is None:
                yield backend
            else:
                report.not_run.append(NotRun(backend.name, "all", why))
        report.not_run += [NotRun(name, "all", why) for name, why in dispatch.broken().items()]
        return
    for name in dict.fromkeys(names):
        backend = dispatch.get(name)
        why = backend.not_here()
        if why is not None:
            raise GdnError(f"backend {name!r} cannot run here: {why}")
        yield backend


def _run_case(case: Case, chosen: list[Backend], full: bool, report: Report) -> None:
    inputs = build(case)
    truth = Truth(inputs)
    s = truth.problem.signature
    for backend in chosen:
        if not full and not in_quick_proof(backend, case):
            report.not_run.append(NotRun(backend.name, case.name, LEFT))
            continue
        outcome = one(backend, case.name, inputs, Settings())
        if outcome.status == "refused":
            report.not_run.append(NotRun(backend.name, case.name, outcome.why))
            continue
        if outcome.status == "failed":
            row = Row(backend.name, case.name, "all", float("inf"), 0.0, 0.0, False, True, 0, outcome.why)
            report.rows.append(row)
            continue
        report.seconds[backend.name] = report.seconds.get(backend.name, 0.0) + outcome.seconds
        # The oracle cannot be judged against itself.
        expectation = truth.by_stages() if backend.name == "numpy" else truth.expectation(outcome.rounding)
        _compare(report, _Computed(backend.name, case, inputs, outcome.tensors, fault=outcome.known), expectation, s)
    if inputs.recorded:
        found = {name: np.asarray(a) for name, a in inputs.recorded.items()}
        computed = _Computed(RECORDED, case, inputs, found, note=inputs.recorded_by)
        _compare(report, computed, truth.expectation(Rounding()), s)


class _Computed(NamedTuple):
    """The tensors that a backend, or a library whose results were recorded, computed in a case.

    Attributes:
        fault: a known error of a library that the backend calls in this case, or "".
        note: a remark on the gradients.
    """

    name: str
    case: Case
    inputs: Inputs
    tensors: dict[str, np.ndarray]
    fault: str = ""
    note: str = ""


def _compare(report: Report, computed: _Computed, e: Expectation, s: Signature) -> None:
    name, case, inputs, found, fault, note = computed
    everything = e.exact if len(found) > 2 else {key: e.exact[key] for key in found}
    for tensor in everything:
        if tensor not in found:
            report.rows.append(Row(name, case.name, tensor, float("inf"), 0.0, 0.0, False, True, 0, "missing"))
            continue
        said = note if len(found) == 2 or tensor.startswith("grad_") else ""  # the remark is about gradients
        verdict = judge(tensor, found[tensor], e, s)
        if not verdict.ok and fault and np.isfinite(verdict.error):
            verdict, said = verdict._replace(ok=True, judged=False), fault
        place = None
        if not verdict.ok:
            starts = inputs.operands.get("cu_seqlens")
            place = first_beyond(tensor, np.asarray(found[tensor]), e, s, starts)
            if found[tensor].shape == e.exact[tensor].shape and only_bfloat16(
                np.asarray(found[tensor]), e.exact[tensor]
            ):
                said = "; ".join([said, ONLY_BFLOAT16] if said else [ONLY_BFLOAT16])
        where = (None, None) if place is None else (place.token, place.head)
        report.rows.append(Row(name, case.name, *verdict, said, *where))
