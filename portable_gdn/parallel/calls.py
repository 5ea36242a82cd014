"""Compute a call, either as a whole or split over a mesh."""

from __future__ import annotations

from typing import Any

from ..door import check_states_every, normalise, run, run_with_states
from ..spec.errors import bad
from ..spec.problem import Options, Problem, Result
from ..watching import note
from .dtensors import compute_shards, has_dtensors
from .placement import Split, split_of
from .sharding import Sharding
from .split_call import Call

__all__ = ["compute", "run_split"]

Array = Any


def compute(
    operands: dict[str, Array],
    options: Options,
    backend: str | None,
    check_values: bool,
    sharding: Sharding | None,
    every: int | None = None,
) -> tuple[Result, Array | None]:
    """Compute a call; return its result, and the intermediate states if ``every`` is given.

    Args:
        operands: The arrays by name, without those that are None.
        options: The other arguments of the call.
        backend: The name of a backend, or None for the first that can run the call.
        check_values: Whether to check the contents of the arrays too.
        sharding: How to split the call; None reads it from the arrays.
        every: The value of ``output_states_every``.

    Raises:
        GdnError: An argument, the backend or the sharding is wrong.
    """
    if has_dtensors(operands):
        if sharding is not None:
            raise bad("sharding", "given with DTensors", "be left out: they say themselves how they are sharded")
        local = lambda own: compute(own, options, backend, check_values, None, every)  # noqa: E731
        return compute_shards(operands, options, local)
    problem, chosen = normalise(operands, options, backend, check_values)
    split = split_of(problem.signature, problem.operands, sharding)
    if split is not None:
        return run_split(problem, options, chosen, backend, split, every)
    if every is None:
        return run(problem, chosen), None
    return run_with_states(problem, chosen, every)


def run_split(
    problem: Problem, options: Options, chosen: Any, backend: str | None, split: Split, every: int | None = None
) -> tuple[Result, Array | None]:
    """Compute a normalised call, split over a mesh.

    Args:
        problem: The whole call.
        options: The options that it was normalised with.
        chosen: The backend that was chosen for it.
        backend: The name that the caller gave, or None.
        split: How to split the call.
        every: The value of ``output_states_every``.
    """
    from .shards import run_shards

    s = problem.signature
    if every is not None:
        every = check_states_every(s, every)
        if split.sequence:
            raise bad("output_states_every", every, "be left out where sharding.sequence splits the tokens")
    note(problem, chosen)
    name = backend if s.traced else chosen.name  # of a trace the lowering may take another one
    return run_shards(Call(s, options, name, chosen.counts_axes, split, every), problem.operands)
