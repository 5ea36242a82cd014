"""The caller may write into numpy operands as soon as a call returns, though JAX has not computed it by then."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from conftest import call, make

import portable_gdn as pg

T = 24
SIZES = {"B": 1, "T": T, "H": 1, "HV": 2, "K": 16, "V": 16}


def _calls():
    """For each operand a call that has it, its options, and what the caller writes into the operand afterwards."""
    rng = np.random.default_rng(0)
    x = make(state=True, **SIZES)
    channels = make("GDN-2", **SIZES)
    mixer = {name: x[name] for name in ("g", "beta", "initial_state")}
    mixer["qkv"] = rng.standard_normal((1, T, 64)).astype(np.float32)
    mixer["conv_weight"], mixer["conv_bias"] = rng.standard_normal((64, 4)).astype(np.float32), np.ones(64, np.float32)
    mixer["conv_state"] = rng.standard_normal((1, 3, 64)).astype(np.float32)
    sizes = {"num_heads": 1, "key_dim": 16}
    gate = {**x, "A_log": np.zeros(2, np.float32), "dt_bias": np.zeros(2, np.float32)}
    ids = np.zeros((1, T), np.int32)
    ids[:, 9:] = 1
    packed = {**make(state=True, N=2, **SIZES), "cu_seqlens": np.array([0, 3, T], np.int32)}
    yield "cu_seqlens", "rule", packed, {}, [0, 17, T]
    yield "segment_ids", "rule", {**x, "segment_ids": ids}, {}, 0
    yield "mask", "rule", {**x, "mask": np.arange(T)[None] > 4}, {}, True
    for name in ("v", "g", "beta", "initial_state"):
        yield name, "rule", x, {}, 0
    for name in ("erase", "write"):
        yield name, "rule", channels, {}, 0
    for name in ("A_log", "dt_bias"):
        yield name, "rule", gate, {"gate": "softplus"}, 2
    for name in ("conv_weight", "conv_bias", "conv_state", "qkv"):
        yield name, "mixer", mixer, sizes, 0


CALLS = {name: rest for name, *rest in _calls()}


@cache
def _late():
    """A function that returns its argument late: calls that wait for it run when their operands were changed."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def late(x, m):
        m = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
        return x + 0 * m[0, 0]

    return lambda x: late(x, jnp.full((700, 700), 1e-3))


@pytest.mark.parametrize("operand", CALLS)
@pytest.mark.parametrize("backend", ["xla", "pallas-interpret"])
def test_operands_may_be_overwritten_after_the_call(operand, backend, tpu_backends):
    jnp = pytest.importorskip("jax.numpy")
    kind, x, options, new = CALLS[operand]
    first = next(name for name in x if name != operand)  # what makes it a call on JAX arrays, and lets it wait
    run = lambda x: call(kind, {**x, first: _late()(jnp.asarray(x[first]))}, backend=backend, **options)[0]  # noqa: E731
    run(x)  # compiles: what follows returns before it is computed
    mine = x[operand].copy()
    o = run({**x, operand: mine})
    mine[...] = new
    assert np.array_equal(o, run(x))
    assert not np.array_equal(o, run({**x, operand: mine})), "writing into this operand changes nothing"


@pytest.mark.parametrize("backend", ["xla", "pallas-interpret"])
def test_boundaries_may_be_overwritten_after_the_first_call_of_a_shape(backend, tpu_backends):
    jnp = pytest.importorskip("jax.numpy")
    for more in range(3):  # each one compiles
        x = {name: jnp.asarray(a) for name, a in make(**{**SIZES, "T": T + more}).items()}
        bounds = np.array([0, 3, T + more], np.int32)
        o, _ = call("rule", {**x, "q": _late()(x["q"]), "cu_seqlens": bounds}, backend=backend)
        bounds[1] = 17
        assert np.array_equal(o, call("rule", {**x, "cu_seqlens": [0, 3, T + more]}, backend=backend)[0])


def test_a_state_without_tokens_is_the_callers_no_longer():
    jnp = pytest.importorskip("jax.numpy")
    x = {name: jnp.asarray(a) for name, a in make(**{**SIZES, "T": 0}).items()}
    state = np.ones((1, 2, 16, 16), np.float32)
    _, found = pg.gated_delta_rule(**x, initial_state=state, output_final_state=True)
    state[...] = 7
    assert np.all(np.asarray(found) == 1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_keeps_its_own_boundaries_for_the_backward_pass(compiled):
    torch = pytest.importorskip("torch")

    def gradient(bounds, change):
        x = {name: torch.tensor(a, requires_grad=True) for name, a in make(**SIZES).items()}
        f = lambda: call("rule", {**x, "cu_seqlens": bounds})[0]  # noqa: E731
        o = (torch.compile(f, backend="aot_eager") if compiled else f)()
        change()
        o.square().sum().backward()
        return x["k"].grad

    mine = np.array([0, 3, T], np.int32)
    got = gradient(mine, lambda: mine.__setitem__(1, 17))
    assert torch.equal(got, gradient([0, 3, T], lambda: None))


def test_the_operands_of_a_call_are_not_changed():
    """``normalise`` leaves the mapping that it was given as it is."""
    from portable_gdn import door
    from portable_gdn.spec.problem import Options

    x = {**make(**SIZES), "cu_seqlens": [0, 3, T]}
    before = dict(x)
    door.normalise(x, Options(), "numpy")
    assert all(x[name] is before[name] for name in before)
    assert list(x) == list(before)
