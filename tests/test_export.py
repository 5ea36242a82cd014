"""``jax.export`` with symbolic dimensions: one exported program serves every number of rows, tokens and sequences."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import call, make

import portable_gdn as pg

jax = pytest.importorskip("jax")
export = pytest.importorskip("jax.export")

SIZES = {"H": 1, "HV": 2, "K": 16, "V": 16}


def _exported(f, x, lead):
    """``f`` of operands by name, exported; ``lead`` names their leading dimensions, "b, t" say."""
    shapes = export.symbolic_args_specs(x, {name: f"{lead[name]}, ..." for name in x})
    return export.export(jax.jit(f))(shapes).call


def _operands(B, T, **more):
    return {**make(B=B, T=T, **SIZES, seed=T), **more}


def _outputs(x):
    o, state = call("rule", x, qk_l2norm=True, output_final_state=True)
    return {"o": o, "state": state}


def test_rows_and_tokens_may_be_symbols():
    lead = dict.fromkeys(("q", "k", "v", "g", "beta"), "b, t")
    run = _exported(_outputs, _operands(1, 3), lead)
    for B, T in ((1, 1), (2, 3), (1, 64), (3, 130)):
        x = _operands(B, T)
        got, want = run(x), _outputs(x)  # of the oracle
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=0, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed", "segments", "mask", "mixer", "gradient"])
def test_other_forms_of_a_call(form):
    T, f = 70, _outputs
    lead = dict.fromkeys(("q", "k", "v", "g", "beta"), "1, t" if form == "packed" else "b, t")

    def operands(B, T):
        x = _operands(1 if form == "packed" else B, T)
        if form == "packed":
            x["cu_seqlens"] = np.linspace(0, T, B + 1).astype(np.int32)
        elif form == "segments":
            x["segment_ids"] = np.tile(np.arange(T) // 3, (B, 1)).astype(np.int32)
        elif form == "mask":
            x["mask"] = np.tile(np.arange(T) > T // 2, (B, 1))
        elif form == "mixer":
            rng = np.random.default_rng(0)
            x = {name: x[name] for name in ("g", "beta")}
            x["qkv"] = rng.standard_normal((B, T, 64)).astype(np.float32)
            x["conv_weight"] = rng.standard_normal((64, 4)).astype(np.float32)
        return x

    if form == "packed":
        lead["cu_seqlens"] = "n + 1"
    elif form in ("segments", "mask"):
        lead["segment_ids" if form == "segments" else "mask"] = "b, t"
    elif form == "mixer":
        lead = dict.fromkeys(("qkv", "g", "beta"), "b, t") | {"conv_weight": "64"}

        def f(x):
            o, state, conv = call("mixer", x, num_heads=1, key_dim=16, output_final_state=True)
            return {"o": o, "state": state, "conv": conv}

    elif form == "gradient":

        def f(x):
            return jax.grad(lambda x: sum((a * a).sum() for a in _outputs(x).values()))(x)

    run = _exported(f, operands(2, T), lead)
    for B, T in ((2, 70), (3, 5)):
        x = operands(B, T)
        got, want = run(x), f(jax.tree.map(jax.numpy.asarray, x) if form == "gradient" else x)
        for name in want:
            error = np.linalg.norm(np.asarray(got[name] - want[name])) / np.linalg.norm(np.asarray(want[name]))
            assert error < 2e-6, name


def test_a_step_of_any_number_of_rows():
    x = {name: a[:, 0] for name, a in _operands(2, 1).items()}
    f = lambda x: {"o": call("step", x)[0]}  # noqa: E731
    run = _exported(f, x, dict.fromkeys(x, "b"))
    for B in (1, 5):
        x = {name: a[:, 0] for name, a in _operands(B, 1).items()}
        np.testing.assert_allclose(run(x)["o"], f(x)["o"], atol=1e-6)


def test_what_needs_a_number_says_so():
    (t,) = export.symbolic_shape("t")
    x = {name: jax.ShapeDtypeStruct((1, t, *a.shape[2:]), a.dtype) for name, a in _operands(1, 3).items()}
    every = jax.jit(lambda x: call("rule", x, output_states_every=2))
    with pytest.raises(pg.GdnError, match="output_states_every is given for T = t tokens, a symbol"):
        export.export(every)(x)
    named = jax.jit(lambda x: call("rule", x, backend="pallas")[0])
    with pytest.raises(pg.GdnError, match="a dimension is symbolic"):
        export.export(named)(x)
