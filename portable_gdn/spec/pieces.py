"""A call piece by piece, each from the state that the one before it left: the states on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import array_api_compat

from .problem import Problem, Result
from .stages import Array

__all__ = ["run_by_pieces"]

#: Operands with a time axis.
WITH_TOKENS = ("q", "k", "v", "g", "beta", "erase", "write", "mask")


def run_by_pieces(run: Callable[[Problem], Result], problem: Problem, every: int) -> tuple[Result, Array]:
    """The call in pieces of ``every`` tokens, and the states [B, T // every, ...] behind each whole one.

    Args:
        run: computes a call.
        problem: rows are sequences; T is at least 1.
        every: tokens between states.
    """
    s, x = problem
    state, outputs, states = x.get("initial_state"), [], []
    for begin in range(0, s.T, every):
        end = min(begin + every, s.T)
        part = {name: a[:, begin:end] if name in WITH_TOKENS else a for name, a in x.items()}
        if state is not None:
            part["initial_state"] = state
        piece = replace(s, T=end - begin, operands=tuple(part), output_final_state=True)
        o, state, _ = run(Problem(piece, part))
        outputs.append(o)
        if end - begin == every:
            states.append(state)
    xp = array_api_compat.array_namespace(outputs[0])
    found = xp.stack(states, axis=1) if states else state[:, None][:, :0]
    return Result(xp.concat(outputs, axis=1), state if s.output_final_state else None, None), found
