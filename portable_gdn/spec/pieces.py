"""A call computed piece by piece, each from the final state of the piece before, to obtain intermediate states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np

from .errors import bad
from .operands import WITH_TOKENS, at_tokens
from .problem import Problem, Result
from .stages import Array
from .torch_tensors import on_host

__all__ = ["run_by_pieces"]

Run = Callable[[Problem], Result]


def run_by_pieces(run: Run, problem: Problem, every: int) -> tuple[Result, Array]:
    """Compute a call in pieces of ``every`` tokens, and keep the state after each whole piece.

    Args:
        run: computes a call.
        problem: a call whose rows are sequences, or whose packed sequences have boundaries that can be read; T is at
            least 1.
        every: the number of tokens between states.

    Returns:
        The result, and the states [B, T // every, ...]. The states of packed sequences follow one another in the order
        of the sequences, and zeros fill the remaining places.
    """
    return (_packed if problem.signature.packed else _rows)(run, problem, every)


def _rows(run: Run, problem: Problem, every: int) -> tuple[Result, Array]:
    s, x = problem
    state, outputs, states = x.get("initial_state"), [], []
    for begin in range(0, s.T, every):
        end = min(begin + every, s.T)
        part = at_tokens(x, slice(begin, end))
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


def _packed(run: Run, problem: Problem, every: int) -> tuple[Result, Array]:
    """Compute in rounds: the first piece of every sequence in one call, then the second of those that have one, ..."""
    s, x = problem
    bounds = _known(x["cu_seqlens"])
    begin, length = bounds[:-1], np.diff(bounds)
    xp = array_api_compat.array_namespace(x["v"])
    where: dict[str, Any] = {"device": x["v"].device} if s.library == "torch" else {}
    take = lambda a, index, axis: xp.take(a, xp.asarray(index, **where), axis=axis)  # noqa: E731
    given = x.get("initial_state")
    if given is None:
        given = xp.zeros(s.state_shape, dtype=xp.float32, **where)
    # States in the order of computation: the given ones, then each round's. ``last`` indexes each sequence's newest
    # one.
    states, outputs, last = [given], [], np.arange(s.N)
    order, places, rows = [], [], []
    before = np.arange(s.N)  # the sequences of the previous round
    first = np.cumsum(length // every) - length // every
    for number in range(-(-int(length.max()) // every)):
        alive = np.flatnonzero(length > number * every)
        size = np.minimum(length[alive] - number * every, every)
        tokens = np.concatenate([begin[n] + number * every + np.arange(m) for n, m in zip(alive, size, strict=True)])
        part = {name: take(a, tokens, 1) if name in WITH_TOKENS else a for name, a in x.items()}
        part["cu_seqlens"] = np.concatenate([[0], np.cumsum(size)]).astype(np.int32)
        part["initial_state"] = take(states[-1], np.searchsorted(before, alive), 0)
        piece = replace(s, T=len(tokens), N=len(alive), operands=tuple(part), output_final_state=True)
        o, state, _ = run(Problem(piece, part))
        newest = sum(len(a) for a in states) + np.arange(len(alive))
        last[alive] = newest
        whole = size == every
        places.append(first[alive[whole]] + number)
        rows.append(newest[whole])
        outputs.append(o)
        states.append(state)
        before = alive
        order.append(tokens)
    o = take(xp.concat(outputs, axis=1), np.argsort(np.concatenate(order)), 1)
    every_state = xp.concat(states, axis=0)
    index = np.concatenate(rows)[np.argsort(np.concatenate(places))]
    left = xp.zeros((s.T // every - len(index), *every_state.shape[1:]), dtype=every_state.dtype, **where)
    found = xp.concat([take(every_state, index, 0), left], axis=0)[None]
    return Result(o, take(every_state, last, 0) if s.output_final_state else None, None), found


def _known(cu_seqlens: Array) -> np.ndarray:
    """Return the boundaries on the host."""
    try:
        return on_host(cu_seqlens)
    except Exception:  # abstract values of a trace, or tensors without contents
        raise bad(
            "cu_seqlens", "not known to the host", "be for output_states_every on this backend; 'xla' takes traced ones"
        ) from None
