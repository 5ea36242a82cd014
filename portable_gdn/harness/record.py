"""Run a suite on one backend and record the results, case by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..spec.backend import Backend
from .cases import Case, build
from .compute import Settings, each, tell
from .run_file import RunWriter, check_target

__all__ = ["Recorded", "record"]


class Recorded(NamedTuple):
    """The number of cases with results, and the reasons for cases without results or with results not finite."""

    done: int
    refused: dict[str, str]
    failed: dict[str, str]


def record(
    path: Path,
    backend: Backend,
    suite: str,
    cases: Sequence[Case],
    settings: Settings,
    store_inputs: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Recorded:
    """Run cases on a backend and write a recording, completely or not at all.

    A case that fails is recorded as failed, and the run continues.

    Args:
        path: the file to write.
        backend: the backend.
        suite: the name of the suite.
        cases: the cases of the suite.
        settings: the settings for the backend.
        store_inputs: whether to store the inputs in the file.
        progress: called with (description, number done, number of all).

    Raises:
        GdnError: the file cannot be written.
    """
    check_target(path)
    done, refused, failed = 0, {}, {}
    derived = backend.derived_stages
    with RunWriter(path, suite, backend.name, settings, derived, store_inputs) as out:
        by_name = {case.name: case for case in cases}
        tell(progress, cases, 0)
        for i, (outcome, out.environment) in enumerate(each(backend, cases, settings)):
            case = by_name[outcome.case]
            out.add(case, build(case), outcome)
            broken = [n for n, a in outcome.tensors.items() if not np.isfinite(np.asarray(a, np.float64)).all()]
            if outcome.status == "refused":
                refused[case.name] = outcome.why
            elif outcome.status == "failed" or broken:
                failed[case.name] = outcome.why or f"{', '.join(broken)}: values that are not finite"
            else:
                done += 1
            tell(progress, cases, i + 1)
    return Recorded(done, refused, failed)
