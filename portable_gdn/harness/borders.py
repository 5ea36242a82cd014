"""States at chunk borders, and outputs, of backends without a probe: one call ends at each border.

The state at a border is the final state of a call on the tokens before it. The backend's own chunks have thus computed
it, however they are joined; this would not be so for a call cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from .. import door
from ..spec.backend import Backend
from ..spec.problem import Options
from .cases import TOKENS, Inputs, rows_of

__all__ = ["MOST", "at_borders"]

#: The largest number of chunks per row. Longer rows have borders further apart, since every border costs a call.
MOST = 16


def at_borders(
    backend: Backend, inputs: Inputs, size: int, found: Mapping[str, np.ndarray]
) -> dict[str, tuple[Any, ...]]:
    """Compute the stages "state" (before and after each chunk) and "output", in the form of ``spec.probe``.

    Args:
        backend: the backend.
        inputs: the call, with T at least 1. Packed sequences become rows, as in ``cases.in_rows``.
        size: the number of tokens per chunk, a power of two. It is doubled until no row has more than ``MOST`` chunks.
        found: o and state of the whole call.

    Raises:
        GdnError: the backend refuses a call.
    """
    x, bounds = dict(inputs.operands), inputs.operands.get("cu_seqlens")
    o, final = np.asarray(found["o"]), _kv(found["state"], inputs.options)
    first = x.get("initial_state")
    first = np.zeros_like(final) if first is None else _kv(first, inputs.options)
    if bounds is None:
        groups = [(slice(None), x, o.shape[1])]
    else:
        o = rows_of(o, bounds)
        groups = [
            (slice(n, n + 1), _alone(x, n, int(begin), int(end)), int(end - begin))
            for n, (begin, end) in enumerate(pairwise(bounds))
        ]
    while o.shape[1] > MOST * size:
        size *= 2
    chunks = -(-o.shape[1] // size)
    states = [first, *(final.copy() for _ in range(chunks))]
    for rows, operands, tokens in groups:
        for border in range(size, tokens, size):
            states[border // size][rows] = _state(backend, operands, inputs.options, border)
    o = np.pad(o, [(0, 0), (0, chunks * size - o.shape[1]), (0, 0), (0, 0)])
    o = np.moveaxis(o.reshape(o.shape[0], chunks, size, *o.shape[2:]), 3, 2)
    return {"state": (np.stack(states[:-1], 1), np.stack(states[1:], 1)), "output": (o,)}


def _kv(state: Any, options: Options) -> np.ndarray:
    state = np.asarray(state)
    return np.swapaxes(state, -1, -2) if options.state_layout == "vk" else state


def _alone(x: Mapping[str, Any], n: int, begin: int, end: int) -> dict[str, Any]:
    """Return one packed sequence as a row of its own."""
    found = {name: a[:, begin:end] if name in TOKENS else a for name, a in x.items() if name != "cu_seqlens"}
    return {name: a[n : n + 1] if name in ("initial_state", "conv_state") else a for name, a in found.items()}


def _state(backend: Backend, x: Mapping[str, Any], options: Options, border: int) -> np.ndarray:
    """Return the state after the first ``border`` tokens of every row."""
    before = {name: a[:, :border] if name in TOKENS else a for name, a in x.items()}
    options = options._replace(output_final_state=True)
    problem, _ = door.normalise(backend.from_numpy(before), options, backend.name)
    return _kv(backend.to_numpy(door.run(problem, backend).state), options)
