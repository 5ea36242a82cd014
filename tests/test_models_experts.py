"""Tokens through their experts: the ways that compute it, against each other."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax.nnx")

import jax
import jax.numpy as jnp

from portable_gdn.models import experts


def drawn(B, T, X, E, M, k, dtype=np.float32):
    rng = np.random.default_rng(0)
    gate, up, down = (rng.standard_normal(s) * s[1] ** -0.5 for s in ((X, E, M), (X, E, M), (X, M, E)))
    chosen = np.stack([rng.permutation(X)[:k] for _ in range(B * T)]).reshape(B, T, k)
    x, shares = rng.standard_normal((B, T, E)), rng.random((B, T, k))
    return [jnp.asarray(a, dtype) for a in (gate, up, down, x)], jnp.asarray(shares, jnp.float32), jnp.asarray(chosen)


@pytest.mark.parametrize(("B", "T"), [(1, 2), (2, 9)])  # gathered, and sorted
def test_each_token_passes_through_its_experts(B, T):
    (gate, up, down, x), shares, chosen = drawn(B, T, 6, 8, 5, 2)
    each = jax.nn.silu(jnp.einsum("bte,xem->btxm", x, gate)) * jnp.einsum("bte,xem->btxm", x, up)
    every = jnp.einsum("btxm,xme->btxe", each, down)
    want = (jnp.take_along_axis(every, chosen[..., None], axis=2) * shares[..., None]).sum(2)
    got = experts._mixed(gate, up, down, x, shares, chosen, "highest")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    halves = [
        experts._mixed(gate[part], up[part], down[part], x, shares, chosen - part.start, "highest")
        for part in (slice(0, 3), slice(3, 6))  # as devices that hold some of the experts
    ]
    np.testing.assert_allclose(sum(halves), want, rtol=1e-5, atol=1e-5)


def test_rows_are_sorted_by_group():
    groups = np.random.default_rng(1).integers(0, 5, 40)
    places, sizes = experts._sorted_places(jnp.asarray(groups), 4)
    assert sizes.tolist() == np.bincount(groups, minlength=5)[:4].tolist()
    assert np.argsort(groups, kind="stable")[np.asarray(places)].tolist() == list(range(40))


@pytest.mark.slow
def test_the_kernel_of_groups_has_the_products_and_gradients_of_ragged_dot(monkeypatch):
    """JAX's own kernel, interpreted, an empty group and rows behind the last group among its rows."""
    import functools
    import importlib

    home = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    rng = np.random.default_rng(2)
    rows, weights = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((200, 128), (3, 128, 256)))
    sizes = jnp.asarray([70, 0, 110], jnp.int32)
    inside = (np.arange(200) < 180)[:, None]

    def loss(product, rows, weights):
        made = jnp.where(inside, product(rows, weights, sizes).astype(jnp.float32), 0)
        return jnp.sum(jnp.sin(made)), made

    plain = functools.partial(loss, jax.lax.ragged_dot)
    ours = functools.partial(loss, functools.partial(experts.grouped_product, precision=None))
    for kernel in (False, True):
        if kernel:
            for name in ("gmm", "tgmm"):
                monkeypatch.setattr(home, name, functools.partial(getattr(home, name), interpret=True))
            monkeypatch.setattr(experts, "kernel_or_else", lambda kernel, elsewhere, *args: kernel(*args))
        got, want = (jax.grad(f, (0, 1), has_aux=True)(rows, weights) for f in (ours, plain))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)
