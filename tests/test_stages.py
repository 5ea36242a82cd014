"""The seven stages: one text for numpy, torch and JAX, right where the formulas are hard on floating point."""

from __future__ import annotations

import importlib

import array_api_compat.numpy as npx
import numpy as np
import pytest

from portable_gdn.spec import chunkwise, stages
from portable_gdn.spec.chunkwise import ChunkOperands
from portable_gdn.spec.evaluate import matmul
from portable_gdn.spec.precision import DEFAULT, FAST, Rounding, rounded_product, stochastic_round
from portable_gdn.spec.stages import Algebra

C, K, V = 16, 8, 6
EXACT = Algebra(npx, matmul)


def operands(n, erase, seed=0, dtype=np.float64, resets=True):
    rng = np.random.default_rng(seed)
    g = -rng.exponential(size=(2, 3, C, n)) * 0.5
    if resets:
        g[rng.random(g.shape) < 0.1] = -np.inf
    k = rng.normal(size=(2, 1, C, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q, v, S = rng.normal(size=(2, 1, C, K)), rng.normal(size=(2, 3, C, V)), rng.normal(size=(2, 3, K, V))
    b = None if erase == 0 else rng.random((2, 3, C, erase))
    w = None if erase == 0 else rng.random((2, 3, C, 1 if erase == 1 else V))
    return [None if a is None else a.astype(dtype) for a in (q, k, v, g, b, w, S)]


def pairwise_scores(x, k, g, strict):
    """The definition, pair by pair: sum over channels of x_i k_j times the decays between."""
    x, k, g = np.broadcast_arrays(x, k, np.repeat(g, K // g.shape[-1], -1))
    out = np.zeros((*x.shape[:-2], C, C))
    for i in range(C):
        for j in range(i + (not strict)):
            with np.errstate(invalid="ignore"):
                out[..., i, j] = (x[..., i, :] * k[..., j, :] * np.exp(g[..., j + 1 : i + 1, :].sum(-2))).sum(-1)
    return out


@pytest.mark.parametrize("n", [1, 2, 4, K])
@pytest.mark.parametrize("erase", [0, 1, K])
def test_scores_are_what_they_are_defined_as(n, erase):
    q, k, _, g, b, _, _ = operands(n, erase)
    Akk, Aqk = stages.scores(EXACT, q, k, b, stages.decay(npx, g), 0.3)
    assert np.allclose(Aqk, 0.3 * pairwise_scores(q, k, g, strict=False), rtol=0, atol=1e-13)
    if b is None:
        assert Akk is None
    else:
        assert np.allclose(Akk, pairwise_scores(b * k, k, g, strict=True), rtol=0, atol=1e-13)


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize(("n", "erase"), [(1, 1), (2, 1), (K, 1), (K, K), (K, 0)])
def test_one_text_serves_all_libraries(library, n, erase):
    pytest.importorskip(library)
    xp = importlib.import_module("jax.numpy" if library == "jax" else "array_api_compat.torch")
    x = operands(n, erase, dtype=np.float32)
    dO, dS = np.ones((2, 3, C, V), np.float32), np.ones((2, 3, K, V), np.float32)

    def run(xp, convert):
        algebra, part = Algebra(xp, matmul), ChunkOperands(*(None if a is None else convert(a) for a in x))
        o, after, saved = chunkwise.forward_chunk(algebra, part, 0.3)
        d = chunkwise.backward_chunk(algebra, part, 0.3, saved, convert(dO), convert(dS))
        named = chunkwise.stage_chunk(algebra, part, 0.3)
        return [np.asarray(a) for a in (o, after, *d, *(y for r in named.values() for y in r)) if a is not None]

    reference = run(npx, np.asarray)
    for a, b in zip(run(xp, xp.asarray), reference, strict=True):
        assert a.dtype == np.float32
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1)


def matrices():
    rng = np.random.default_rng(0)
    k = rng.normal(size=(64, 16))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    one = np.broadcast_to(k[:1], k.shape)
    near = np.sqrt(0.1) * k + np.sqrt(0.9) * one
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    return {
        f"{name}, beta {beta}": np.tril(beta * keys @ keys.T, -1)
        for name, keys in (("random", k), ("correlated", near), ("repeated", one))
        for beta in (1.0, 1.998)
    }


@pytest.mark.parametrize("name", matrices())
def test_the_inverse_survives_repeated_and_correlated_keys(name):
    A = matrices()[name].astype(np.float32)
    exact = np.linalg.inv(np.eye(64) + A.astype(np.float64))
    ladder64 = stages.inverse(EXACT, A[None].astype(np.float64))[0]
    ladder32 = stages.inverse(EXACT, A[None])[0]
    for found, eps in ((ladder64, 2.0**-52), (ladder32, 2.0**-23)):
        # What rounding Akk alone would do, to first order; the power series errs by up to 1e21 here.
        bound = eps * (np.abs(exact) @ (np.abs(A) + np.eye(64)) @ np.abs(exact))
        assert np.abs(found - exact).max() <= bound.max()


def test_a_reset_counts_and_does_not_sum():
    g = np.array([-0.1, -np.inf, -0.2, -1e6, -0.3, 0, 0, -0.4])[:, None]
    G, count = stages.decay(npx, g)
    assert np.allclose(G[:, 0], [-0.1, 0, -0.2, 0, -0.3, -0.3, -0.3, -0.7])
    assert np.array_equal(count[:, 0], [0, 1, 1, 2, 2, 2, 2, 2])
    D = stages.pair_decay(npx, stages.Decays(G, count))[0]
    assert D[1, 0] == D[3, 2] == D[4, 0] == 0
    assert D[2, 1] == pytest.approx(np.exp(-0.2))
    assert D[4, 3] == pytest.approx(np.exp(-0.3))


@pytest.mark.parametrize("tokens", [5, 6, 21, 40, 63])
def test_a_gate_of_zero_leaves_a_large_sum_as_it_was_to_the_bit(tokens):
    """Masked tokens and the filling of a short chunk: what was written before them does not decay at all."""
    g = -np.random.default_rng(tokens).exponential(20, (64, 3)).astype(np.float32)
    g[tokens:] = 0
    g[10:13] = 0
    G, count = stages.decay(npx, g)
    assert np.array_equal(G[tokens:], np.broadcast_to(G[tokens - 1], G[tokens:].shape))
    assert np.array_equal(stages.to_end(npx, stages.Decays(G, count))[tokens - 1 :], np.ones_like(G[tokens - 1 :]))
    assert np.array_equal(G[10:13], np.broadcast_to(G[9], (3, 3)))


@pytest.mark.parametrize("n", [1, K])
def test_no_exponent_is_positive_whatever_the_gates(n, monkeypatch):
    seen = []
    real = np.exp
    monkeypatch.setattr(npx, "exp", lambda x: seen.append(np.max(x)) or real(x))
    x = operands(n, 1)
    x[3] = np.where(np.isinf(x[3]), -np.inf, 100 * x[3])
    chunkwise.forward_chunk(EXACT, ChunkOperands(*x), 0.3)
    assert seen
    assert max(seen) <= 0


def test_segments_do_not_see_each_other_by_a_bit():
    x = operands(1, 1, dtype=np.float32, resets=False)
    starts = np.zeros((2, 1, C, 1), bool)
    starts[:, :, 5] = True
    o, S, _ = chunkwise.forward_chunk(EXACT, ChunkOperands(*x, starts), 0.3)
    moved = [None if a is None else a.copy() for a in x]
    for a in moved[:6]:
        a[..., :5, :] *= 0.7
    o2, S2, _ = chunkwise.forward_chunk(EXACT, ChunkOperands(*moved, starts), 0.3)
    assert np.array_equal(o[..., 5:, :], o2[..., 5:, :])
    assert np.array_equal(S, S2)
    assert not np.array_equal(o[..., :5, :], o2[..., :5, :])


def test_dg_is_accurate_where_decays_are_strong():
    """q dq + e de - k dk cancels to nothing under gates of -20; the sums by side do not."""
    x = operands(1, 1, resets=False)
    x[3] = np.full_like(x[3], -20.0)
    dO, dS = np.ones((2, 3, C, V)), np.ones((2, 3, K, V))

    def dg(dtype):
        y = ChunkOperands(*(a.astype(dtype) for a in x))
        _, _, saved = chunkwise.forward_chunk(EXACT, y, 0.3)
        return chunkwise.backward_chunk(EXACT, y, 0.3, saved, dO.astype(dtype), dS.astype(dtype)).g

    exact = dg(np.float64)
    assert np.linalg.norm(dg(np.float32) - exact) <= 1e-5 * np.linalg.norm(exact)


def test_stochastic_rounding_is_unbiased_and_keeps_its_bits():
    rng = np.random.default_rng(0)
    x = np.full(20000, 1 + 0.3 * 2.0**-7)
    y = stochastic_round(x, 8, rng)
    assert set(np.unique(y)) == {1.0, 1 + 2.0**-7}
    assert abs((y - x).mean()) < 4 * 2.0**-7 * 0.5 / np.sqrt(len(x))
    assert np.array_equal(stochastic_round(np.array([0.0, 1.5, -3.0]), 8, rng), [0.0, 1.5, -3.0])


def test_a_rounding_must_name_operands_and_formats_that_exist():
    with pytest.raises(ValueError, match="operands are"):
        Rounding({"z": "bfloat16"})
    with pytest.raises(ValueError, match="formats"):
        Rounding({"q": "int8"})


def test_products_round_what_is_declared_and_nothing_else():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 8)), rng.normal(size=(8, 8))
    for declared, low, high in ((FAST, 1e-3, 8e-2), (DEFAULT, 1e-6, 4e-4)):
        error = np.abs(rounded_product(Rounding(declared), rng)(a, b, "T", "R") - a @ b).max()
        assert low < error < high
    assert np.array_equal(rounded_product(Rounding({"q": "bfloat16"}), rng)(a, b, "T", "R"), a @ b)
