"""``output_states_every``: the states on the way, by every backend the same, and the rule as it is without them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import portable_gdn as pg


def operands(T=50, B=2, H=1, HV=2, K=8, V=6, seed=0):
    rng = np.random.default_rng(seed)
    x = {
        "q": rng.standard_normal((B, T, H, K)), "k": rng.standard_normal((B, T, H, K)),
        "v": rng.standard_normal((B, T, HV, V)), "g": -rng.random((B, T, HV)), "beta": rng.random((B, T, HV)),
        "initial_state": rng.standard_normal((B, HV, K, V)),
    }  # fmt: skip
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    return {n: a.astype(np.float32) for n, a in x.items()}


def upto(x, n):
    return {name: a if name == "initial_state" else a[:, :n] for name, a in x.items()}


def library(name, x):
    if name == "torch":
        torch = pytest.importorskip("torch")
        return {n: torch.from_numpy(a) for n, a in x.items()}
    if name in ("xla", "pallas-interpret"):
        jnp = pytest.importorskip("jax.numpy")
        return {n: jnp.asarray(a) for n, a in x.items()}
    return x


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *((backend, layout) for backend in ("numpy", "torch", "xla") for layout in ("kv", "vk")),
        pytest.param("pallas-interpret", "vk", marks=pytest.mark.slow),
    ],
)
def test_they_are_the_final_states_of_shorter_calls(backend, layout):
    x, every = operands(), 16
    if layout == "vk":
        x["initial_state"] = x["initial_state"].swapaxes(-1, -2)
    mask = np.ones(x["beta"].shape[:2], bool)
    mask[0, :5] = False
    options = {"state_layout": layout, "qk_l2norm": True, "backend": backend}
    given = library(backend, {**x, "mask": mask})
    o, states = pg.gated_delta_rule(**given, output_states_every=every, output_final_state=True, **options)
    want, final = pg.gated_delta_rule(**given, output_final_state=True, **options)
    np.testing.assert_allclose(np.asarray(o), np.asarray(want), atol=2e-5)
    np.testing.assert_allclose(np.asarray(states.final), np.asarray(final), atol=2e-5)
    assert states.every.shape[1] == 3
    for n in range(3):
        short = library(backend, upto({**x, "mask": mask}, (n + 1) * every))
        _, at = pg.gated_delta_rule(**short, output_final_state=True, **options)
        np.testing.assert_allclose(np.asarray(states.every[:, n]), np.asarray(at), atol=2e-5)


@pytest.mark.parametrize("T", [520, pytest.param(512, marks=pytest.mark.slow)])
def test_the_tpu_kernel_returns_them_as_it_goes(T, monkeypatch):
    jax = pytest.importorskip("jax")
    from portable_gdn.tpu import calls

    monkeypatch.setattr(calls, "run_by_pieces", None)  # not in pieces
    x = operands(T=T, B=1, K=128, V=128)
    given = library("xla", x)
    o, states = pg.gated_delta_rule(**given, output_states_every=256, backend="pallas-interpret")
    want, expected = pg.gated_delta_rule(**x, output_states_every=256, backend="numpy")
    assert states.final is None
    assert states.every.shape == (1, 2, 2, 128, 128)
    for found, exact in ((o, want), (states.every, expected.every)):
        assert np.linalg.norm(np.asarray(found) - exact) < 1e-5 * np.linalg.norm(exact)
    monkeypatch.undo()
    loss = lambda x, backend: (  # noqa: E731
        pg.gated_delta_rule(**x, output_states_every=256, backend=backend)[1].every ** 2
    ).sum()
    if T == 512:
        a, b = (jax.grad(loss)(given, backend) for backend in ("pallas-interpret", "xla"))
        for name in ("k", "v", "g", "beta", "initial_state"):
            np.testing.assert_allclose(a[name], b[name], atol=1e-3 * float(abs(b[name]).max()))


def test_none_where_the_sequence_is_shorter_and_none_without_tokens():
    for T in (7, 0):
        o, states = pg.gated_delta_rule(**operands(T=T), output_states_every=8, backend="numpy")
        assert o.shape[1] == T
        assert states.every.shape == (2, 0, 2, 8, 6)
        assert states.final is None


@pytest.mark.parametrize("every", [0, -3, 2.0, True, "8"])
def test_what_is_no_interval_is_refused(every):
    with pytest.raises(pg.GdnError, match=r"output_states_every is .* must be a positive integer"):
        pg.gated_delta_rule(**operands(), output_states_every=every, backend="numpy")


def packed(bounds, seed=0, **sizes):
    x = operands(T=bounds[-1], B=1, seed=seed, **sizes)
    x["initial_state"] = np.random.default_rng(seed).standard_normal((len(bounds) - 1, 2, 8, 6)).astype(np.float32)
    return x


BOUNDS = [0, 0, 16, 19, 59, 59, 75, 90]  # empty, one piece, none, two and a half, empty, one piece, almost one


@pytest.mark.parametrize("every", [16, 5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["numpy", "torch", "xla", "pallas-interpret"])
def test_packed_sequences_have_theirs_one_after_the_other(backend, every):
    x = packed(BOUNDS)
    given = library(backend, x)
    options = {"output_states_every": every, "output_final_state": True, "backend": backend}
    o, states = pg.gated_delta_rule(**given, cu_seqlens=BOUNDS, **options)
    assert states.every.shape == (1, 90 // every, 2, 8, 6)
    place = 0
    for n, (begin, end) in enumerate(pairwise(BOUNDS)):
        alone = {name: a[n : n + 1] if name == "initial_state" else a[:, begin:end] for name, a in x.items()}
        want, expected = pg.gated_delta_rule(**alone, **{**options, "backend": "numpy"})
        np.testing.assert_allclose(np.asarray(o[:, begin:end]), want, atol=2e-5)
        np.testing.assert_allclose(np.asarray(states.final[n : n + 1]), expected.final, atol=2e-5)
        count = (end - begin) // every
        np.testing.assert_allclose(np.asarray(states.every[:, place : place + count]), expected.every, atol=2e-5)
        place += count
    assert not np.asarray(states.every[:, place:]).any()


def test_packed_sequences_with_a_mask_and_boundaries_of_a_trace():
    jax = pytest.importorskip("jax")
    x = library("xla", {**packed(BOUNDS), "mask": np.arange(90)[None] % 7 != 3})
    want, expected = pg.gated_delta_rule(**x, cu_seqlens=BOUNDS, output_states_every=16, backend="xla")
    call = jax.jit(lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, output_states_every=16))
    o, states = call(x, np.array(BOUNDS))
    np.testing.assert_allclose(o, want, atol=1e-6)
    np.testing.assert_allclose(states.every, expected.every, atol=1e-6)
    exact = pg.gated_delta_rule(
        **{name: np.asarray(a) for name, a in x.items()}, cu_seqlens=BOUNDS, output_states_every=16, backend="numpy"
    )
    np.testing.assert_allclose(states.every, exact[1].every, atol=2e-5)


@pytest.mark.parametrize("bounds", [[0, 40], [0, 3, 19, 40]])
def test_their_gradients_are_those_of_shorter_calls(bounds):
    """Of xla in one pass, and of torch piece by piece, against torch's over each sequence alone."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    x = packed(bounds)
    weight = np.random.default_rng(3).standard_normal((1, bounds[-1] // 5, 2, 8, 6)).astype(np.float32)
    more = {"cu_seqlens": bounds} if len(bounds) > 2 else {}

    def loss(x, weight, backend):
        o, states = pg.gated_delta_rule(**x, **more, output_states_every=5, output_final_state=True, backend=backend)
        return (o * o).sum() + (states.every * weight).sum() + (states.final * states.final).sum()

    by_xla = jax.grad(loss)({name: jax.numpy.asarray(a) for name, a in x.items()}, weight, "xla")
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in x.items()}
    loss(leaves, torch.tensor(weight), "torch").backward()
    alone = {name: torch.tensor(a, requires_grad=True) for name, a in x.items()}
    total, place = 0, 0
    for n, (begin, end) in enumerate(pairwise(bounds)):
        state = alone["initial_state"][n : n + 1]
        for first in range(begin, end, 5):
            last = min(first + 5, end)
            part = {name: a[:, first:last] for name, a in alone.items() if name != "initial_state"}
            o, state = pg.gated_delta_rule(**part, initial_state=state, output_final_state=True, backend="torch")
            total = total + (o * o).sum()
            if last - first == 5:
                total, place = total + (state * torch.tensor(weight[:, place])).sum(), place + 1
        total = total + (state * state).sum()
    total.backward()
    for name, a in alone.items():
        for got in (by_xla[name], leaves[name].grad):
            error = np.linalg.norm(np.asarray(got) - a.grad.numpy()) / np.linalg.norm(a.grad.numpy())
            assert error < 3e-6, name


def test_segments_are_refused():
    with pytest.raises(pg.GdnError, match="given with segment_ids; it must be left out"):
        pg.gated_delta_rule(
            **operands(B=1), segment_ids=np.zeros((1, 50), np.int32), output_states_every=8, backend="numpy"
        )
