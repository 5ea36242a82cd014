"""The output norm and gate of a mixer: against the formula, by every backend, in steps, and faults that are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, assert_all_close, assert_close, oracle

import portable_gdn as pg
from portable_gdn.harness.cases import build, cases_named
from portable_gdn.harness.truth import Truth
from portable_gdn.harness.verify import verify
from portable_gdn.spec import prologue
from portable_gdn.spec.evaluate import evaluate
from portable_gdn.spec.gates import sigmoid
from portable_gdn.spec.problem import NormKind

from test_mixer import CHANNELS, HEADS, HV, V, W, operands  # isort: skip

KINDS = (NormKind(1e-6, "silu"), NormKind(1e-3, "sigmoid"), NormKind(1e-6, None))


def with_norm(x, kind, seed=5):
    rng = np.random.default_rng(seed)
    x = {**x, "norm_weight": rng.standard_normal(V).astype(np.float32)}
    if kind.activation is not None:
        x["z"] = 2 * rng.standard_normal((*x["beta"].shape, V)).astype(np.float32)
    return x


def by_hand(o, x, kind):
    n = o / np.sqrt((o * o).mean(-1, keepdims=True) + kind.eps) * x["norm_weight"].astype(np.float64)
    if kind.activation is None:
        return n
    z = x["z"].reshape(o.shape).astype(np.float64)
    return n / (1 + np.exp(-z)) * (z if kind.activation == "silu" else 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.activation))
def test_o_is_what_the_formula_says(library, kind):
    plain = operands(state=True)
    x = with_norm(plain, kind)
    exact = oracle(x, kind="mixer", norm=kind, **{**HEADS, **SMALL})
    np.testing.assert_allclose(exact.o, by_hand(oracle(plain, kind="mixer", **HEADS, **SMALL).o, x, kind), rtol=1e-12)
    o, *states = library.run("mixer", x, norm=kind, output_final_state=True, **HEADS, **SMALL)
    assert_close(o, exact.o, exact.sizes["o"], eps=16)
    if "z" in x:  # as projections write it
        flat = {**x, "z": x["z"].reshape(*x["z"].shape[:2], -1)}
        again, *_ = library.run("mixer", flat, norm=kind, **HEADS, **SMALL)
        assert np.array_equal(o, again)
    for a, b in zip(states, library.run("mixer", plain, output_final_state=True, **HEADS, **SMALL)[1:], strict=True):
        assert np.array_equal(a, b)


def test_a_step_is_a_token_of_a_sequence(library):
    kind = KINDS[0]
    x = with_norm(operands(T=3, bias=True), kind)
    want = library.run("mixer", x, norm=kind, output_final_state=True, **HEADS, **SMALL)
    states, outputs = {}, []
    for t in range(3):
        tokens = {n: a[:, t] if n in ("qkv", "g", "beta", "z") else a for n, a in x.items()}
        o, *both = library.run("mixer step", {**tokens, **states}, norm=kind, **HEADS)
        states = dict(zip(("initial_state", "conv_state"), both, strict=True))
        outputs.append(o)
    for got, a in zip((np.stack(outputs, 1), *both), want, strict=True):
        assert_close(got, a, eps=16)
    assert both[1].shape == (2, W - 1, CHANNELS)


def test_gradients_are_slopes_of_the_oracle():
    """Every operand, the norm's among them, along one direction."""
    case = replace(
        cases_named(["mixer, norm and silu gate"])[0], T=5, K=4, V=4, HV=2, H=1, dtype="float32", layout="rows"
    )
    inputs = build(case)
    truth = Truth(inputs)
    rng = np.random.default_rng(0)
    directions = {n: rng.standard_normal(a.shape) for n, a in truth.exact.gradients.items()}

    def loss(h):
        x = {n: np.asarray(a, np.float64) + h * directions[n] for n, a in truth.problem.operands.items()}
        e = evaluate(truth.problem._replace(operands=x))
        return (e.o * inputs.cotangents["o"]).sum() + (e.state * inputs.cotangents["state"]).sum()

    h = 1e-4
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    found = sum((truth.exact.gradients[n] * d).sum() for n, d in directions.items())
    assert {"z", "norm_weight"} <= set(directions)
    assert abs(found - slope) < 1e-7 * abs(slope)


def test_extremes_are_finite(library):
    """Gates far from 0, and heads whose output is 0: nothing is written, and the norm divides by sqrt(eps)."""
    kind = KINDS[0]
    x = with_norm(operands(T=3), kind)
    x["beta"][:, :, 0] = 0
    x["z"][0, 0], x["z"][0, 1], x["z"][1] = 1e4, -1e4, 0
    d = {"o": np.random.default_rng(1).standard_normal((2, 3, HV, V)).astype(np.float32)}
    exact = oracle(x, d, kind="mixer", norm=kind, **{**HEADS, **SMALL})
    o, _, grads = library.both(x, d, "mixer", norm=kind, **HEADS, **SMALL)
    assert not o[:, :, 0].any()
    assert all(np.isfinite(a).all() for a in grads.values())
    assert_all_close(grads, exact, eps=32)


# Faults -------------------------------------------------------------------------------------------------------------


def _with(r=None, gate=None, of_weight=None, square=None):
    """The norm in torch, with one step of it replaced."""

    def norm(xp, o, weight, z, eps, activation):
        mean = xp.mean(o * o, axis=-1, keepdims=True)
        y = o * (1 / xp.sqrt(mean + eps) if r is None else r(mean, eps))
        y = y * (weight if of_weight is None else of_weight(weight, y))
        if z is None:
            return y
        a = z * sigmoid(xp, z) if activation == "silu" else sigmoid(xp, z)
        return y * (a if gate is None else gate(z, a))

    return norm


def _one_head_only(weight, y):
    """The weight's gradient comes of the first head alone."""
    first = weight.expand(y.shape[-2:]).clone()
    first[1:] = weight.detach()
    return first


NORM_FAULTS = {
    "none": (_with(), True),
    "the projection is left out": (_with(r=lambda mean, eps: 1 / (mean + eps).sqrt().detach()), False),
    "eps outside of the root": (_with(r=lambda mean, eps: 1 / (mean.sqrt() + eps**0.5)), False),
    "the weight is left out": (_with(of_weight=lambda weight, y: 0 * weight + 1), False),
    "the weight's sum is over one head": (_with(of_weight=_one_head_only), False),
    "silu's slope is its value's": (_with(gate=lambda z, a: z * (a / z).detach()), False),
    "z is rounded to 16 bits": (_with(gate=lambda z, a: a.bfloat16().float()), False),
}


@pytest.mark.parametrize("fault", NORM_FAULTS)
def test_faults_are_found(fault, monkeypatch):
    pytest.importorskip("torch")
    norm, sound = NORM_FAULTS[fault]
    monkeypatch.setattr(prologue, "gated_norm", norm)
    case = replace(cases_named(["mixer, norm and silu gate"])[0], dtype="float32", T=40)
    assert verify(["torch"], cases=[case]).ok == sound


# Input --------------------------------------------------------------------------------------------------------------

WRONG = {
    "z without a norm": ({"output_norm": None}, ["z is given without output_norm", "GatedRMSNorm"]),
    "a norm of another class": ({"output_norm": 1e-6}, ["output_norm is a float", "GatedRMSNorm"]),
    "no z": ({"z": None}, ["z is None with output_norm.activation 'silu'", "[B, T, HV, V]", "activation None"]),
    "z without a gate": ({"activation": None}, ["z is given with output_norm.activation None", "left out"]),
    "activation": ({"activation": "gelu"}, ["output_norm.activation is 'gelu'", "'silu' or 'sigmoid'"]),
    "eps": ({"eps": 0.0}, ["output_norm.eps is 0.0", "above 0"]),
    "channels of z": ({"z": np.zeros((2, 40, HV, 8), np.float32)}, ["z is of shape [2, 40, 4, 8]", "[2, 40, 96]"]),
    "dtype of z": ({"z": np.zeros((2, 40, HV, V), np.int32)}, ["z is of dtype int32", "float32"]),
    "weight": ({"weight": np.zeros(16, np.float32)}, ["output_norm.weight is of shape [16]", "[V] = [24]"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gets_a_sentence(name):
    change, words = WRONG[name]
    x = with_norm(operands(), KINDS[0])
    norm = pg.GatedRMSNorm(
        **{"weight": x["norm_weight"], **{n: change[n] for n in ("weight", "eps", "activation") if n in change}}
    )
    arguments = {"output_norm": norm, "z": x["z"], **{n: a for n, a in change.items() if n in ("output_norm", "z")}}
    with pytest.raises(pg.GdnError) as error:
        pg.gated_delta_mixer(
            x["qkv"], x["g"], beta=x["beta"], conv=pg.ShortConv(x["conv_weight"]), num_heads=2, key_dim=16, **arguments
        )
    for word in words:
        assert word in str(error.value)
