"""The float64 oracle: its gradients against finite differences, its two forms against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from portable_gdn import door
from portable_gdn.harness.cases import Case, build
from portable_gdn.spec.evaluate import chunk_by_chunk, evaluate
from portable_gdn.spec.problem import Problem

SMALL = Case("small", T=37, H=2, HV=4, K=8, V=6)
CASES = [
    replace(SMALL, variant=variant, gates=gates, seed=i)
    for i, (variant, gates) in enumerate(
        [
            ("DeltaNet", "mild"),
            ("GDN", "one -inf"),
            ("GDN", "-3 each"),
            ("tile-grouped", "many resets"),
            ("KDA", "many resets"),
            ("KDA", "-3 each"),
            ("GDN-2", "one -inf"),
            ("GLA", "many resets"),
            ("GLA (scalar)", "mild"),
            ("linear attention", "mild"),
        ]
    )
] + [
    replace(SMALL, gate="softplus", l2norm=True, variant="KDA"),
    replace(SMALL, gate="bounded", l2norm=True),
    replace(SMALL, layout="packed with empties", conv=3),
    replace(SMALL, layout="segments", B=2, conv=4, gate="softplus"),
    replace(SMALL, layout="holes", B=2, conv=4, l2norm=True),
    replace(SMALL, layout="step", B=2, variant="GDN-2", state_layout="vk"),
    replace(SMALL, keys="repeated", beta="1.998"),
    replace(SMALL, T=1),
    replace(SMALL, T=0),
]


def problem(case):
    inputs = build(case)
    operands = {k: a.astype(np.float64) if a.dtype.kind == "f" else a for k, a in inputs.operands.items()}
    signature = door.normalise(dict(inputs.operands), inputs.options, "numpy")[0].signature
    cotangents = {k: a.astype(np.float64) for k, a in inputs.cotangents.items()}
    return Problem(signature, operands), cotangents


def name(case):
    return f"{case.variant}-{case.gates}-{case.layout}-{case.gate}-{case.conv}-T{case.T}-{case.keys}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_gradients_are_those_of_finite_differences(case):
    p, cotangents = problem(case)
    found = evaluate(p, cotangents)
    rng = np.random.default_rng(0)
    for operand, gradient in found.gradients.items():
        x = p.operands[operand]
        free = np.isfinite(x) & (np.abs(x) < 1e4)
        direction = np.where(free, rng.normal(size=x.shape), 0.0)

        def loss(step, operand=operand, x=x, free=free, direction=direction):
            moved = np.where(free, np.where(free, x, 0.0) + step * direction, x)
            e = evaluate(Problem(p.signature, {**p.operands, operand: moved}))
            return (e.o * cotangents["o"]).sum() + (e.state * cotangents["state"]).sum()

        numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
        exact = (np.where(free, gradient, 0.0) * direction).sum()
        scale = np.sqrt((np.where(free, found.sizes[operand], 0.0) ** 2).sum())
        assert abs(numeric - exact) <= 2e-8 * scale + 1e-9, operand


@pytest.mark.parametrize("case", CASES, ids=name)
@pytest.mark.parametrize("fused", [True, False])
def test_the_stages_agree_with_the_recurrence(case, fused):
    p, cotangents = problem(case)
    token, chunk = evaluate(p, cotangents), evaluate(p, cotangents, chunk_by_chunk(16, fused=fused))
    pairs = {"o": (token.o, chunk.o), "state": (token.state, chunk.state)}
    pairs |= {n: (token.gradients[n], chunk.gradients[n]) for n in token.gradients}
    for tensor, (a, b) in pairs.items():
        assert np.abs(a - b).max(initial=0) <= 1e-12 * np.abs(token.sizes[tensor]).max(initial=1), tensor


def test_sizes_bound_what_they_are_sizes_of():
    p, cotangents = problem(replace(SMALL, variant="GDN-2"))
    e = evaluate(p, cotangents)
    values = {"o": e.o, "state": e.state, **e.gradients}
    for tensor, size in e.sizes.items():
        if tensor != "g":  # dg is a sum over later tokens of what its size counts token by token
            assert np.all(np.abs(values[tensor]) <= size * (1 + 1e-9)), tensor


def test_large_states_are_taken_head_by_head(monkeypatch):
    p, cotangents = problem(SMALL)
    whole = evaluate(p, cotangents)
    monkeypatch.setattr("portable_gdn.spec.oracle._LARGEST", 1)
    parts = evaluate(p, cotangents)
    assert np.array_equal(whole.o, parts.o)
    for tensor in whole.gradients:
        assert np.array_equal(whole.gradients[tensor], parts.gradients[tensor]), tensor
