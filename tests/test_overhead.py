"""What validation and choice cost a call: at most 20 microseconds, a call like an earlier one."""

from __future__ import annotations

import statistics
import time

import pytest
from conftest import make

from portable_gdn import api, door
from portable_gdn.spec.problem import Options


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_the_door_costs_less_than_20_microseconds(framework, packed):
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

    def enter():
        return door.normalise(
            *api._rule_call(
                *operands,
                None,
                None,
                state,
                bounds,
                None,
                None,
                None,
                Options(None, True, False, None, None, None, "kv", False),
            ),
            None,
            False,
        )

    enter()
    medians = []
    for _ in range(3):
        times = []
        for _ in range(2000):
            start = time.perf_counter_ns()
            enter()
            times.append(time.perf_counter_ns() - start)
        medians.append(statistics.median(times) / 1e3)
    assert min(medians) < 20, f"{min(medians):.1f} us"
