"""A call computed: whole, or split over a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..door import check_states_every, normalise, run, run_with_states
from ..spec.errors import bad
from ..spec.problem import Options, Problem, Result, Signature
from ..watching import note
from .placement import Split, split_of
from .sharding import Sharding

__all__ = ["Call", "compute", "run_split"]

Array = Any


@dataclass(frozen=True)
class Call:
    """A call that is split, without its arrays; hashable, so that it can be the static argument of a compiled function.

    Attributes:
        signature: the whole call.
        options: as the caller gave them.
        backend: the name that each device's call asks for, or None.
        counts_axes: whether that backend may be traced where ``shard_map`` counts the axes that values vary over.
        split: over which mesh, and how.
        every: tokens between the states that are returned on the way, or None.
    """

    signature: Signature
    options: Options
    backend: str | None
    counts_axes: bool
    split: Split
    every: int | None


def compute(
    operands: dict[str, Array],
    options: Options,
    backend: str | None,
    check_values: bool,
    sharding: Sharding | None,
    every: int | None = None,
) -> tuple[Result, Array | None]:
    """The result of a call, and the states on the way where ``every`` is given.

    Args:
        operands: arrays by name, without those that are None.
        options: the rest of the call.
        backend: a name, or None.
        check_values: also look at the contents.
        sharding: how it is split, or None: as its arrays are.
        every: ``output_states_every``.

    Raises:
        GdnError: what is wrong with the call, the backend or the sharding.
    """
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
    """A normalised call, split over a mesh.

    Args:
        problem: the whole call.
        options: those that it was normalised with.
        chosen: its backend, which was asked for as ``backend``.
        split: how.
        every: ``output_states_every``.
    """
    from .shards import run_shards

    s = problem.signature
    if every is not None:
        every = check_states_every(s, every)
        if split.sequence:
            raise bad("output_states_every", every, "be left out where sharding.sequence splits the tokens")
    note(s, chosen)
    name = backend if s.traced else chosen.name  # of a trace the lowering may take another one
    return run_shards(Call(s, options, name, chosen.counts_axes, split, every), problem.operands)
