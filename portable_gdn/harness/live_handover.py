"""A live request moved from one backend's pool to another's: its slot, drafts that wait in it too, by file.

The request's prompt is computed on the first backend, then a window of two tokens that will be accepted and two that
will not. The slot is exported, written, read, and put into another slot of the second backend's pool, whose states have
the other layout; the rest of the request goes on there. Outputs and states are judged by the oracle of the whole
sequence of accepted tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import door
from ..serving.batch import Batch
from ..serving.calls import update_operands
from ..serving.pool import StatePool, state_pool
from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.precision import Rounding
from ..spec.problem import UpdateOptions
from ..spec.undisturbed import undisturbed
from .cases import TOKENS, Case, Inputs, build
from .handover import HandedOver
from .judge import allowance, by_head
from .slot_file import load_slot, save_slot
from .truth import Truth

__all__ = ["LIVE", "move"]

LIVE = (
    Case("live request", T=130, dtype="bfloat16", HV=6, l2norm=True, state=False),
    Case("live request, mixer", T=130, conv=4, gate="softplus", l2norm=True, HV=4, state=False),
)
#: Tokens of the prompt, of the window, and how many of these are accepted.
PROMPT, WINDOW, ACCEPTED = 90, 4, 2


def move(
    first: Backend, second: Backend, cases: Sequence[Case], progress: Callable[[str, int, int], None] | None = None
) -> tuple[list[HandedOver], dict[str, str], dict[str, str]]:
    """Each case's outputs and states judged; what a backend refuses; and where one fails, with the reason."""
    rows, refused, failed = [], {}, {}
    for i, case in enumerate(cases):
        if progress is not None:
            progress(case.name, i, len(cases))
        try:
            rows += _moved(first, second, case)
        except GdnError as error:
            refused[case.name] = str(error)
        except Exception as error:  # the other cases are worth having
            failed[case.name] = f"{type(error).__name__}: {error}"
    return rows, refused, failed


@undisturbed()
def _moved(first: Backend, second: Backend, case: Case) -> list[HandedOver]:
    inputs = build(case)
    pool = _pool(first, case, inputs, "kv", 3)
    _, pool, _ = _step(first, inputs, "kv", pool, slice(0, PROMPT), (1, 0, 0))
    window = np.r_[PROMPT : PROMPT + ACCEPTED, : WINDOW - ACCEPTED]  # the last ones are rejected
    _, pool, began = _step(first, inputs, "kv", pool, window, (1, PROMPT, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slot.safetensors"
        save_slot(path, pool.export(1))
        states, _ = load_slot(path)
    rest = slice(PROMPT + ACCEPTED, case.T)
    pool = _pool(second, case, inputs, "vk", 4).import_(3, states, state_layout="vk")
    o, pool, went_on = _step(second, inputs, "vk", pool, rest, (3, rest.start, ACCEPTED))
    found = {"o": o[None], "state": pool.export(3, state_layout="vk").recurrent[None]}
    truth = Truth(inputs, gradients=False)
    s = truth.problem.signature
    expected = truth.expectation(began), truth.expectation(went_on)
    rows = []
    for name, value in found.items():
        exact = expected[0].exact[name]
        exact = exact[:, rest] if name == "o" else exact
        norm, off = by_head(name, exact, s), by_head(name, np.asarray(value, np.float64) - exact, s)
        _, budget = allowance(name, off, *expected)
        with np.errstate(invalid="ignore", divide="ignore"):
            head = int(np.argmax(np.where(np.isnan(off), np.inf, off / budget)))
        unit = norm[head] or 1.0
        layouts = "kv to vk" if name == "state" else ""
        ok = bool(np.all(off <= budget))
        rows.append(HandedOver(case.name, name, layouts, float(off[head] / unit), float(budget[head] / unit), ok))
    return rows


def _pool(backend: Backend, case: Case, inputs: Inputs, layout: str, slots: int) -> StatePool:
    return state_pool(
        slots, library=backend.libraries[0], num_heads=case.H, num_value_heads=case.HV, key_dim=case.K,
        value_dim=case.V, dtype=case.dtype, state_layout=layout, conv_width=case.conv, window=WINDOW,
        variant=case.variant,
    )  # fmt: skip


def _step(
    backend: Backend, inputs: Inputs, layout: str, pool: StatePool, tokens: Any, row: tuple[int, int, int]
) -> tuple[np.ndarray, StatePool, Rounding]:
    """One update of some tokens; row: the slot, the tokens computed, and those accepted of the ones that wait."""
    x = {name: a[0, tokens] if name in TOKENS else a for name, a in inputs.operands.items()}
    slot, computed, accepted = row
    count = len(next(a for name, a in x.items() if name in TOKENS))
    batch = Batch(*(np.array(a, np.int32) for a in ([0, count], [slot], [computed], [accepted])))
    options = inputs.options._replace(output_final_state=False, state_layout=layout, update=UpdateOptions(WINDOW, None))
    operands = {**backend.from_numpy(x), **update_operands(pool, batch)}
    problem, _ = door.normalise(operands, options, backend.name, check_values=True)
    result = door.run_update(problem, backend)
    return np.asarray(backend.to_numpy(result.o)), pool.replaced(result.pool), backend.rounding(problem.signature)
