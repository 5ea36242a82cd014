"""What validation and choice cost a call: at most 20 microseconds, a call like an earlier one.

The limit is of a machine with nothing else to do. Here others may be at work on the same cores, and so the time of a
call is compared with that of plain Python beside it, in turn.
"""

from __future__ import annotations

import pytest
from conftest import make, quiet_microseconds

import portable_gdn as pg
from portable_gdn.parallel import calls
from portable_gdn.spec.problem import Result


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_the_door_costs_less_than_20_microseconds(framework, packed, monkeypatch):
    x = framework.arrays(make(B=1, state=True))
    bounds = [0, 10, 40] if packed else None
    x["initial_state"] = (
        x["initial_state"].repeat(2, *(1, 1, 1) if framework.name == "torch" else (0,))
        if packed
        else x["initial_state"]
    )
    operands = [x[name] for name in ("q", "k", "v", "g", "beta")]
    state = x["initial_state"]
    if packed and framework.name == "torch":
        import torch

        bounds = torch.tensor(bounds)

    monkeypatch.setattr(calls, "run", lambda problem, backend: Result(None, None, None))

    def enter():
        q, k, v, g, beta = operands
        pg.gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=bounds)

    enter()
    took = min(quiet_microseconds(enter) for _ in range(3))
    assert took < 20, f"{took:.1f} us"
