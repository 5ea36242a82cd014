"""MaxText's function replaced by our call, on a module with its name and parameters: MaxText needs a newer Python."""

from __future__ import annotations

import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portable_gdn import GdnError
from portable_gdn.integrations import patch_maxtext

NAME = "jax_chunk_gated_delta_rule"


def recurrence(
    query, key, value, g, beta, chunk_size=64, initial_state=None, use_qk_norm_in_gdn=False, cp_axis=None,
    compute_dtype=jnp.bfloat16,
):  # fmt: skip
    """The rule token by token in float32, as MaxText's function gives it back; 7 where tokens are split."""
    if cp_axis:
        return jnp.full_like(value, 7), None
    dtype = query.dtype
    q, k, v, g, beta = (jnp.moveaxis(a.astype(jnp.float32), 1, 0) for a in (query, key, value, g, beta))
    if use_qk_norm_in_gdn:
        q, k = (a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    start = 0 * k[0, ..., None] * v[0, ..., None, :] if initial_state is None else initial_state.astype(jnp.float32)

    def step(S, x):
        q, k, v, g, beta = x
        S = S * jnp.exp(g)[..., None, None]
        S = S + k[..., None] * (beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, S)))[..., None, :]
        return S, jnp.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S)

    end, o = jax.lax.scan(step, start, (q, k, v, g, beta))
    return jnp.moveaxis(o, 0, 1).astype(dtype), None if initial_state is None else end


@pytest.fixture
def module(monkeypatch):
    """What ``maxtext.models.qwen3`` is, and a layer in it that looks the function up as MaxText's does."""
    made = ModuleType("maxtext.models.qwen3")
    made.jax_chunk_gated_delta_rule = recurrence
    made.layer = lambda *args, **options: getattr(made, NAME)(*args, **options)
    for name in ("maxtext", "maxtext.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def operands(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    B, T, H, K, V = 1, 70, 2, 8, 12
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, H, n)), dtype) for n in (K, K, V))
    g = jnp.asarray(-rng.uniform(0, 0.3, (B, T, H)), dtype)
    beta = jnp.asarray(rng.uniform(0, 1, (B, T, H)), dtype)
    return (q, k, v, g, beta), jnp.asarray(rng.standard_normal((B, H, K, V)), dtype)


def near(got, want, limit=1e-5):
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want) > 0


def test_outputs_and_states_are_the_same(module):
    x, state = operands()

    def calls():
        plain, nothing = module.layer(*x, use_qk_norm_in_gdn=True, chunk_size=32)
        assert nothing is None
        return plain, *module.layer(*x[:2], 0.1 * x[2], *x[3:], 64, state, True)

    want = calls()
    with patch_maxtext(precision="highest"):
        assert getattr(module, NAME) is not recurrence
        got = calls()
        x, state = operands(jnp.bfloat16)
        o, end = module.layer(*x, initial_state=state, use_qk_norm_in_gdn=True)
        assert (o.dtype, end.dtype) == (jnp.bfloat16, jnp.float32)
    near(o, recurrence(*x, 64, state, True)[0], 1e-2)
    for a, b in zip(got, want, strict=True):
        near(a, b)


@pytest.mark.slow
def test_gradients_inside_their_shard_map(module):
    x, _ = operands()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = jax.sharding.PartitionSpec("data")

    def gradients():
        def run(*x):
            return module.layer(*x, use_qk_norm_in_gdn=True, compute_dtype=jnp.float32)[0]

        def loss(*x):
            return jnp.square(jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)(*x)).sum()

        return jax.jit(jax.grad(loss, range(5)))(*x)

    want = gradients()
    with patch_maxtext(precision="highest"):
        got = gradients()
    for a, b in zip(got, want, strict=True):
        near(a, b)


def test_split_tokens_are_theirs_and_undo(module):
    x, _ = operands()
    outer = patch_maxtext()
    inner = patch_maxtext(backend="xla")
    for axis in ("context", ("context", "tensor")):
        assert (module.layer(*x, cp_axis=axis)[0] == 7).all()
    assert (module.layer(*x, cp_axis=None)[0] != 7).any()
    inner.undo()
    inner.undo()
    outer.undo()
    assert getattr(module, NAME) is recurrence


def test_other_releases_are_refused(module, monkeypatch):
    def newer(query, key, value, g, beta, chunk_size=64, initial_state=None, pad_size=0):
        raise AssertionError

    setattr(module, NAME, newer)
    with pytest.raises(GdnError, match="initial_state, pad_size; it must take query"):
        patch_maxtext()
    assert getattr(module, NAME) is newer
    delattr(module, NAME)
    with pytest.raises(GdnError, match="is not there; it must take"):
        patch_maxtext()
    monkeypatch.setitem(sys.modules, "maxtext.models.qwen3", None)
    with pytest.raises(GdnError, match="MaxText must be installed"):
        patch_maxtext()
