"""The comparison of the stages of two runs of one case: where they begin to differ, and what could not be compared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..spec.problem import Signature
from ..spec.stages import STAGES
from .cases import Inputs, rows_of
from .compute import Outcome
from .judge import Expectation, allowance, by_head
from .stages import (
    SPECIFICATION,
    Parting,
    Side,
    StageTruth,
    at_common_boundaries,
    chunk_of,
    first_parting,
    partial_stages,
    stage_errors,
)

__all__ = ["Run", "StageReport", "by_stages"]


class Run(NamedTuple):
    """One side of a case: its stages and results, its inputs, and how much its results may differ."""

    side: Side
    outcome: Outcome
    inputs: Inputs
    expected: Expectation


class StageReport(NamedTuple):
    """The result of comparing stages.

    ``errors`` are the relative (error, budget) by side and stage. ``parting`` is where the sides begin to differ or, if
    they agree, where one of them leaves the exact stages; ``apart`` names the two that differ. ``remarks`` say what
    could not be compared, and why.
    """

    errors: dict[str, dict[str, tuple[float, float]]]
    parting: Parting | None
    apart: tuple[str, str]
    remarks: list[str]


def by_stages(a: Run, b: Run, s: Signature, same: bool, holds: bool) -> StageReport:
    """Compare two runs stage by stage.

    Args:
        a: one run.
        b: the other run.
        s: the signature of the call.
        same: whether both had equal inputs; if not, each is compared only with its own exact stages.
        holds: whether the results agree, in which case missing stages need no remark.
    """
    names = (a.side.name, b.side.name)
    have = [run for run in (a, b) if run.side.stages]
    remarks = [remark for run in have if (remark := _unlike(run, s))]
    if not have:
        if not holds:
            why = a.outcome.why or b.outcome.why or "record with --stages"
            remarks.append(f"no stages were probed, so that the first one to part cannot be named: {why.rstrip('.')}")
        return StageReport({}, None, names, remarks)
    truths: dict[tuple[int, int], StageTruth] = {}

    def truth(run: Run, chunk: int) -> StageTruth:
        """Return the exact stages for a run's operands, or for those of the first run if both had equal inputs."""
        key = (0 if same or run is a else 1, chunk)
        if key not in truths:
            truths[key] = StageTruth(run.inputs, chunk)
        return truths[key]

    errors = {run.side.name: stage_errors(truth(run, chunk_of(run.side.stages)), run.side) for run in have}
    for run in have:
        other = b if run is a else a
        if partial_stages(run.side.stages):
            remarks.append(
                f"of {run.side.name} states at chunk borders and outputs are compared, had by shorter calls: "
                f"{run.outcome.why.rstrip('.') or 'it shows no other stages'}"
            )
        elif not other.side.stages or partial_stages(other.side.stages):
            said = f"{run.side.name} is held against the exact stages; {other.side.name} has none of this case"
            remarks.append(f"{said}: {other.outcome.why.rstrip('.')}" if other.outcome.why else said)
    found: list[tuple[int, Parting, tuple[str, str]]] = []  # each with its chunk's first token
    unlike_size = False
    if len(have) == 2 and same:
        tokens = int(np.diff(a.inputs.operands["cu_seqlens"]).max()) if s.packed else s.T
        x, y, chunk, left_out = at_common_boundaries(a.side, b.side, tokens)
        remarks += [left_out] if left_out else []
        between = first_parting(truth(a, chunk), x, y)
        found += [] if between is None else [(between.chunk * chunk, between, names)]
        unlike_size = bool(left_out)
    elif len(have) == 2:
        remarks.append("the sides were given different values: each is held against its own exact stages")
    alike = len({partial_stages(run.side.stages) for run in have}) == 1
    # A side with more stages than the other may leave the exact stages before a difference between the two can show.
    if not found or not (alike or unlike_size):
        for run in have:
            chunk = chunk_of(run.side.stages)
            alone = first_parting(truth(run, chunk), run.side)
            if alone is not None:
                found.append((alone.chunk * chunk, alone, (run.side.name, SPECIFICATION)))
                if alike:
                    break
    if not found:
        return StageReport(errors, None, names, remarks)
    _, parting, apart = min(found, key=lambda place: (place[0], STAGES.index(place[1].stage)))
    return StageReport(errors, parting, apart, remarks)


def _unlike(run: Run, s: Signature) -> str:
    """Return a remark if the probe's outputs are not those that the backend returns, so that its stages say little.

    Both may round differently, in chunks of different sizes, so each has the budget of the result.
    """
    (o,), found, e = run.side.stages["output"], run.outcome.tensors.get("o"), run.expected
    if o is None or found is None:
        return ""
    o, found = np.moveaxis(np.asarray(o, np.float64), 2, 3), np.asarray(found, np.float64)
    found = rows_of(found, run.inputs.operands["cu_seqlens"]) if s.packed else found
    o = o.reshape(o.shape[0], -1, s.HV, s.V)[:, : found.shape[1]]
    if s.has("mask") or s.packed:  # outputs of masked tokens are 0 by definition
        o = np.where(found == 0, 0.0, o)
    off = by_head("o", found - o, s)
    _, budget = allowance("o", off, e, e)
    if np.all(off <= budget):
        return ""
    head = int(np.argmax(np.nan_to_num(off - budget, nan=np.inf)))
    return (
        f"the outputs of {run.side.name} are not those of its own stages (head {head} is off by {off[head]:.1e}, where "
        f"{budget[head]:.1e} may be): what parts lies outside the stages, in what is done before or around them"
    )
