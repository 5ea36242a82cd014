"""What served the calls of a piece of code."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import call, make

import portable_gdn as pg


def test_calls_are_listed_in_their_order(library):
    x = library.arrays(make(state=True, T=3))
    step = library.arrays({name: a[:, :1] if name != "initial_state" else a for name, a in make(state=True).items()})
    with pg.watch() as calls:
        call("rule", x)
        with pg.watch() as inner:
            call("step", {name: a[:, 0] if name != "initial_state" else a for name, a in step.items()})
        call("rule", x, output_states_every=2)
    call("rule", x)
    assert [(c.signature.step, c.signature.T) for c in calls] == [(False, 3), (True, 1), (False, 3)]
    assert inner == calls[1:2]
    assert {c.backend for c in calls} == {{"numpy": "numpy", "torch": "torch", "jax": "xla"}[library.name]}
    assert str(calls[0]).startswith("GDN rule, float32, highest, B=2 T=3 N=2 H=2 HV=4 K=16 V=24 on ")


def test_a_block_that_fails_is_not_watched_any_longer():
    with pytest.raises(KeyError), pg.watch() as calls:
        raise KeyError
    call("rule", make())
    assert calls == []


def test_a_compiled_function_makes_its_calls_once(jax_library):
    jax = pytest.importorskip("jax")
    f = jax.jit(lambda x: call("rule", x)[0])
    x = jax_library.arrays(make(T=2))
    with pg.watch() as calls:
        f(x), f(x)
    assert [c.backend for c in calls] == ["pallas if compiled for a TPU, xla elsewhere"]
    with pg.watch() as calls:
        jax.jit(lambda x: call("rule", x, backend="xla")[0])(x)
        jax.jit(lambda x: call("step", {name: a[:, 0] for name, a in x.items()})[0])(x)
        call("rule", x)
    assert [c.backend for c in calls] == ["xla", "xla", "xla"]


def test_a_call_without_tokens_is_served_by_none():
    with pg.watch() as calls:
        o, _ = pg.gated_delta_rule(*(np.zeros((1, 0, 1, 16), np.float32),) * 3)
    assert o.shape == (1, 0, 1, 16)
    assert calls == []
