"""The NNX layers: against a layer written out token by token in float64, and in all the ways they can be called."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from checkpoints import checkpoint, facts, save, tensors

from portable_gdn import MixerState
from portable_gdn.checkpoint import port
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")
pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from portable_gdn.checkpoint.loading import load_layer, load_tree  # noqa: E402
from portable_gdn.layers import GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention  # noqa: E402

EPS = float(np.finfo(np.float32).eps)
LAYERS = ("qwen3_next", "kimi_linear", "fla_gdn2_layer")
MORE = ("olmo_hybrid", "bailing_hybrid")
run = nnx.jit(lambda layer, x, state=None: layer(x, state=state, output_final_state=True))
step = nnx.jit(lambda layer, x, state: layer.step(x, state))


@cache
def layer_and_leaves(name: str):
    """The first layer of a family's port, with weights of realistic size, in float32; and its leaves in float64."""
    with TemporaryDirectory() as folder:
        found = facts(name)
        x = tensors(found["tensors"])
        for key, a in x.items():
            scaled = np.asarray(a, np.float32) * (0.1 if a.ndim == 2 else 0.5) + (1 if "norm" in key else 0)
            x[key] = scaled.astype(a.dtype)
        save(Path(folder) / "src", x, found["config"])
        port(Path(folder) / "src", Path(folder) / "out", "nnx")
        layer = load_layer(Path(folder) / "out", 0, dtype=jnp.float32)
        tree = load_tree(Path(folder) / "out", under="layers.0.mixer")
    leaves = {}
    jax.tree_util.tree_map_with_path(
        lambda path, a: leaves.update({".".join(p.key for p in path): np.asarray(a, np.float64)}), tree
    )
    return layer, leaves


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def written_out(layer, w, x):
    """y [T, E], the state and the last inputs of the convolution for one row x [T, E], token by token in float64."""
    H, HV, K, V = layer.num_heads, layer.num_value_heads, layer.key_dim, layer.value_dim
    T, r, W = len(x), HV // H, layer.conv_size
    raw = np.concatenate([x @ w[f"{n}_proj.kernel"] for n in "qkv"], axis=1)
    taps = np.concatenate([w[f"{n}_conv1d.kernel"][:, 0] for n in "qkv"], axis=1)
    before = np.concatenate([np.zeros((W - 1, raw.shape[1])), raw])
    y = sum(before[j : j + T] * taps[j] for j in range(W))
    q, k, v = np.split(y * sigmoid(y), [H * K, 2 * H * K], axis=1)
    q, k = (a.reshape(T, H, K) / np.sqrt((a.reshape(T, H, K) ** 2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    v = v.reshape(T, HV, V)

    def product(name):
        if f"{name}_a_proj.kernel" in w:
            return x @ w[f"{name}_a_proj.kernel"] @ w[f"{name}_b_proj.kernel"] + w.get(f"{name}_b_proj.bias", 0)
        return x @ w[f"{name}_proj.kernel"]

    S = np.zeros((HV, K, V))
    out = np.zeros((T, HV, V))
    b = layer.beta_scale * sigmoid(x @ w["b_proj.kernel"])
    write = sigmoid(x @ w["w_proj.kernel"]).reshape(T, HV, V) if "w_proj.kernel" in w else None
    decay = product("a" if isinstance(layer, GatedDeltaNet) else "f")
    for t in range(T):
        for h in range(HV):
            n = h // r
            if isinstance(layer, GatedDeltaNet2):
                z = decay[t].reshape(H, K)[n] + w["dt_bias"].reshape(H, K)[n]
                A, erase, wr = w["A_log"][n], b[t].reshape(H, K)[n], write[t, h]
            elif isinstance(layer, KimiDeltaAttention):
                z = decay[t].reshape(HV, K)[h] + w["dt_bias"].reshape(HV, K)[h]
                A, erase, wr = w["A_log"][h], b[t, h], b[t, h]
            else:
                z, A, erase, wr = decay[t, h] + w["dt_bias"][h], w["A_log"][h], b[t, h], b[t, h]
            bound = getattr(layer, "lower_bound", None)
            g = -np.exp(A) * np.log1p(np.exp(z)) if bound is None else bound * sigmoid(np.exp(A) * z)
            S[h] = np.exp(g).reshape(-1, 1) * S[h]
            S[h] = S[h] + np.outer(k[t, n], wr * v[t, h] - S[h].T @ (erase * k[t, n]))
            out[t, h] = K**-0.5 * S[h].T @ q[t, n]
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + layer.o_norm.eps) * w["o_norm.scale"]
    if layer.o_norm.gate is not None:
        z = product("g").reshape(T, HV, V)
        out = out * (sigmoid(z) if layer.o_norm.gate == "sigmoid" else z * sigmoid(z))
    return out.reshape(T, -1) @ w["o_proj.kernel"], S, raw[T - (W - 1) :]


def close(got, want, eps=200):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= eps * EPS * np.linalg.norm(want)


def text(T=40, seed=0):
    return np.random.default_rng(seed).standard_normal((2, T, 64)).astype(np.float32)


@pytest.mark.parametrize("name", [*LAYERS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_layer_is_what_its_formula_says(name):
    """Prefill, then steps, against the whole sequence token by token."""
    layer, leaves = layer_and_leaves(name)
    x = text()
    y, state = run(layer, x[:, :37])
    steps = []
    for t in range(37, 40):
        z, state = step(layer, x[:, t], state)
        steps.append(z)
    got = np.concatenate([y, np.stack(steps, axis=1)], axis=1)
    for row in range(2):
        want, S, conv = written_out(layer, leaves, x[row].astype(np.float64))
        close(got[row], want)
        close(state.recurrent[row], S)
        close(state.conv[row], conv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next"])
def test_packed_sequences_continued_ones_and_padding(name):
    layer, _ = layer_and_leaves(name)
    x = text()
    whole, end = run(layer, x)
    packed, ends = layer(x.reshape(1, 80, 64), cu_seqlens=np.array([0, 40, 40, 80]), output_final_state=True)
    close(packed.reshape(2, 40, 64), whole)
    close(ends.recurrent[np.array([0, 2])], end.recurrent)
    assert not np.asarray(ends.recurrent[1]).any()
    ids = np.repeat([0, 1], 40)[None]
    close(layer(x.reshape(1, 80, 64), segment_ids=ids)[0], packed)
    first, between = run(layer, x[:, :23])
    second, again = run(layer, x[:, 23:], between)
    close(np.concatenate([first, second], axis=1), whole)
    close(again.recurrent, end.recurrent)
    close(again.conv, end.conv)
    padded = np.concatenate([np.full((2, 5, 64), 7, np.float32), x], axis=1)
    mask = np.arange(45) >= 5
    close(layer(padded, mask=np.stack([mask, mask]))[0][:, 5:], whole)


@pytest.mark.slow
def test_under_grad_and_without_jit():
    layer, _ = layer_and_leaves("kimi_linear")
    x = text()
    close(layer(x)[0], run(layer, x)[0])
    grads = nnx.jit(nnx.grad(lambda layer: (layer(x)[0] ** 2).sum()))(layer)
    assert {".".join(path) for path in dict(nnx.to_flat_state(grads))} == set(layer_and_leaves("kimi_linear")[1])
    for path, grad in nnx.to_flat_state(grads):
        assert np.isfinite(np.asarray(grad[...], np.float32)).all(), path
        assert np.asarray(grad[...], np.float32).any(), path


def test_fresh_layers_have_the_documented_state():
    """Names and shapes of the tree that ports write, at their initial values."""
    options = {"num_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 16, "rngs": nnx.Rngs(0)}
    for layer, leaves in (
        (GatedDeltaNet(32, **options), {"a_proj.kernel": (32, 4), "g_proj.kernel": (32, 64), "dt_bias": (4,)}),
        (
            KimiDeltaAttention(32, decay_rank=5, gate_rank=6, **options),
            {"f_a_proj.kernel": (32, 5), "f_b_proj.kernel": (5, 32), "g_b_proj.kernel": (6, 64), "dt_bias": (32,)},
        ),
        (
            GatedDeltaNet2(32, decay_rank=5, gate_rank=6, conv_size=0, **options),
            {"b_proj.kernel": (32, 16), "w_proj.kernel": (32, 64), "A_log": (2,), "dt_bias": (16,)},
        ),
    ):
        have = {".".join(path): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(layer))}
        assert leaves.items() <= have.items()
        assert have["o_proj.kernel"] == (64, 32)
        y, state = nnx.eval_shape(run, layer, np.ones((1, 5, 32), np.float32))
        z, after = nnx.eval_shape(step, layer, np.ones((1, 32), np.float32), state)
        assert (y.shape, z.shape) == ((1, 5, 32), (1, 32))
        assert after == state  # shapes and dtypes


def test_what_cannot_be_loaded_is_said(tmp_path):
    source = checkpoint(tmp_path / "src", "kimi_linear")
    port(source, tmp_path / "out", "jax")
    with pytest.raises(GdnError, match="be one with linear attention: 0, 1, 2"):
        load_layer(tmp_path / "out", 3)
    with pytest.raises(GdnError, match="path in the port"):
        load_tree(tmp_path / "out", under="layers.9")
    port(source, tmp_path / "fla", "fla")
    with pytest.raises(GdnError, match="be one to jax"):
        load_layer(tmp_path / "fla", 0)
    with pytest.raises(GdnError, match=r"without portable_gdn\.json"):
        load_layer(source, 0)


def test_leaves_are_put_where_they_are_asked_to_be(tmp_path):
    """Sharded as they are read; only what is asked for is there."""
    port(checkpoint(tmp_path / "src", "qwen3_next"), tmp_path / "out", "jax")
    mesh = jax.make_mesh((jax.device_count(),), ("heads",))
    spec = lambda name, shape: jax.NamedSharding(mesh, jax.P(None, "heads") if len(shape) == 2 else jax.P())  # noqa: E731
    tree = load_tree(tmp_path / "out", under="layers.0.mixer", sharding=spec)
    plain = load_tree(tmp_path / "out", under="layers.0.mixer")
    assert tree["q_proj"]["kernel"].sharding.spec == jax.P(None, "heads")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), tree, plain))
    only = load_tree(tmp_path / "out", names=["layers.1.mixer.A_log"])
    assert only["layers"]["1"]["mixer"].keys() == {"A_log"}


def _layer(**options):
    return GatedDeltaNet(8, **{"num_heads": 2, "key_dim": 4, "rngs": nnx.Rngs(0), **options})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: _layer(num_head=2), "num_head is no keyword of GatedDeltaNet; did you mean 'num_heads'?"),
        (lambda: _layer(tap_count=2), "tap_count is no keyword of GatedDeltaNet; its keywords are hidden_size, gate"),
        (
            lambda: KimiDeltaAttention(8, num_heads=2, key_dim=4, gate_rank=2, decay_rnak=2, rngs=nnx.Rngs(0)),
            "decay_rnak is no keyword of KimiDeltaAttention; did you mean 'decay_rank'?",
        ),
        (lambda: GatedDeltaNet(8, num_heads=2, rngs=nnx.Rngs(0)), "GatedDeltaNet is called without key_dim"),
        (lambda: GatedDeltaNet(8, num_heads=2, key_dim=4), "GatedDeltaNet is called without rngs"),
        (
            lambda: GatedDeltaNet2(8, num_heads=2, key_dim=4, gate_rank=1, rngs=nnx.Rngs(0)),
            "GatedDeltaNet2 is called without decay_rank",
        ),
        (lambda: _layer(num_heads=0), "num_heads is 0; it must be a positive integer"),
        (lambda: _layer(num_value_heads=3), "num_value_heads is 3; it must be a multiple of num_heads = 2"),
        (lambda: _layer(conv_size=-1), "conv_size is -1; it must be an integer, 0 for no convolution"),
        (lambda: _layer(gate="relu"), "gate is 'relu'; it must be None or one of silu, sigmoid"),
        (
            lambda: _layer()(np.ones((3, 8))),
            r"x is of shape \[3, 8\]; it must have shape \[B, T, E\] with E = 8; `step`",
        ),
        (lambda: _layer()(np.ones((3, 2, 9))), r"x is of shape \[3, 2, 9\]; it must have shape \[B, T, E\] with E = 8"),
        (lambda: _layer()(7), r"x is of type int; it must be an array \[B, T, E\]"),
        (lambda: _layer().step(np.ones((3, 1, 8))), r"it must have shape \[B, E\] with E = 8; call the layer"),
        (lambda: _layer().step(np.ones((3, 8)), _layer().init_state(2)), r"state.recurrent is of shape \[2, 2, 4, 4\]"),
        (lambda: _layer().step(np.ones((3, 8)), 5), r"state is a int; it must be None or a MixerState"),
        (lambda: _layer().init_state("3"), "batch is '3'; it must be a number of rows"),
    ],
)
def test_wrong_options_and_arrays_get_a_sentence(make, sentence):
    with pytest.raises(GdnError, match=sentence):
        make()


@pytest.mark.parametrize("conv_size", [4, 0])
def test_decoding_may_begin_with_nothing(conv_size):
    layer, x = _layer(conv_size=conv_size), np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    want, after = layer(x[:, None], output_final_state=True)
    for start in (None, layer.init_state(3), MixerState()):
        y, state = layer.step(x, start)
        close(y, want[:, 0])
        close(state.recurrent, after.recurrent)
        assert state.conv.shape == after.conv.shape == layer.init_state(3).conv.shape
        np.testing.assert_array_equal(state.conv, after.conv)


def test_a_layer_may_be_overwritten_after_the_call_and_be_static():
    layer, x = _layer(), np.ones((1, 5, 8), np.float32)
    y = layer(x)[0]
    x[...] = 7
    assert np.array_equal(y, layer(np.ones((1, 5, 8), np.float32))[0])
    assert hash(nnx.split(layer)[0]) == hash(nnx.split(layer)[0])
