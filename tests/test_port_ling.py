"""Ling-2.6: told from Ling-3.0 by its tensors; its lightning attention beside the published formula in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import checkpoint, read_file, save

from portable_gdn.checkpoint import back, port
from portable_gdn.spec.errors import GdnError

BF16 = ml_dtypes.bfloat16
E, X, V = 48, 4, 64


def config(heads: int = 4, width: int = 16, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"], "hidden_size": E,
        "num_hidden_layers": 4, "vocab_size": V, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": width, "layer_group_size": 4, "group_norm_size": 2, "use_qk_norm": True, "rms_norm_eps": 1e-6,
        "rope_theta": 600000.0, "partial_rotary_factor": 0.5, "rope_scaling": None, "intermediate_size": 96,
        "moe_intermediate_size": 32, "num_experts": X, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "moe_router_enable_expert_bias": True, "tie_word_embeddings": False, "hidden_act": "silu", **changes,
    }  # fmt: skip


def model(heads: int = 4, width: int = 16, qk_norm: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    b = lambda *s: (rng.standard_normal(s) * s[-1] ** -0.5).astype(np.float32).astype(BF16)  # noqa: E731
    norm = lambda n: (1 + 0.1 * rng.standard_normal(n)).astype(np.float32).astype(BF16)  # noqa: E731
    size = heads * width
    x = {"lm_head.weight": b(V, E), "model.word_embeddings.weight": b(V, E), "model.norm.weight": norm(E)}
    for n in range(4):
        p, a = f"model.layers.{n}.", f"model.layers.{n}.attention."
        x |= {p + "input_layernorm.weight": norm(E), p + "post_attention_layernorm.weight": norm(E)}
        if n < 3:
            x |= {a + "query_key_value.weight": b(3 * size, E), a + "g_proj.weight": b(size, E)}
            x |= {a + "dense.weight": b(E, size), a + "g_norm.weight": norm(size)}
            if qk_norm:
                x |= {a + "query_layernorm.weight": norm(width), a + "key_layernorm.weight": norm(width)}
        else:
            x |= {a + "q_a_proj.weight": b(8, E), a + "q_a_layernorm.weight": norm(8), a + "q_b_proj.weight": b(96, 8)}
            x |= {a + "kv_a_proj_with_mqa.weight": b(24, E), a + "kv_a_layernorm.weight": norm(16)}
            x |= {a + "kv_b_proj.weight": b(128, 16), a + "dense.weight": b(E, 64)}
        m = p + "mlp."
        if n == 0:
            x |= {m + f"{k}_proj.weight": b(96, E) for k in ("gate", "up")} | {m + "down_proj.weight": b(E, 96)}
            continue
        x |= {m + "gate.weight": b(X, E), m + "gate.expert_bias": rng.standard_normal(X).astype(np.float32)}
        for start in ("shared_experts.", *(f"experts.{e}." for e in range(X))):
            x |= {m + start + f"{k}_proj.weight": b(32, E) for k in ("gate", "up")}
            x |= {m + start + "down_proj.weight": b(E, 32)}
    return x


def leaves(folder: Path) -> dict[str, np.ndarray]:
    return {n: a for p in sorted(folder.glob("*.safetensors")) for n, a in read_file(p).items()}


@pytest.mark.parametrize(
    ("heads", "width", "changes", "qk_norm"),
    [
        (4, 16, {}, True),
        (3, 16, {"head_dim": None}, True),
        (6, 8, {"head_dim": 8, "qk_rope_head_dim": 8}, True),
        (3, 16, {"head_dim": 8}, True),  # as transformers writes it: MLA's rotary width
        (4, 16, {"use_qk_norm": False}, False),
        (4, 16, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}}, True),
    ],
)
def test_ling_there_and_back(tmp_path, heads, width, changes, qk_norm):
    x = model(heads, width, qk_norm)
    source = save(tmp_path / "src", x, config(heads, width, **changes), files=2)
    port(source, tmp_path / "out", "jax")
    back(tmp_path / "out", tmp_path / "back")
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    stored = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())
    assert stored["family"] == "bailing_gla"
    assert stored["linear_layers"] == [0, 1, 2]
    assert (stored["mixer"]["num_heads"], stored["mixer"]["key_dim"], stored["mixer"]["kind"]) == (heads, width, "gla")
    have = leaves(tmp_path / "out")
    parts = [have[f"layers.1.mixer.{m}_proj.kernel"].T for m in "qkv"]
    assert np.array_equal(np.concatenate(parts), x["model.layers.1.attention.query_key_value.weight"])


def test_the_two_of_one_model_type_are_told_apart(tmp_path):
    port(checkpoint(tmp_path / "three", "bailing_hybrid"), tmp_path / "out", "jax")
    assert json.loads((tmp_path / "out" / "portable_gdn.json").read_text())["family"] == "bailing_hybrid"
    x = {
        "base_model.model.model.layers.1.attention.query_key_value.lora_A.weight": np.ones((4, E), np.float32),
        "base_model.model.model.layers.1.attention.query_key_value.lora_B.weight": np.ones((192, 4), np.float32),
    }
    adapter = save(tmp_path / "adapter", x, None)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    port(adapter, tmp_path / "small", "nnx", base=tmp_path / "config.json")
    assert "layers.1.mixer.k_proj.lora.lora_b" in leaves(tmp_path / "small")


@pytest.mark.parametrize(
    "name",
    ["1.attention.g_norm.weight", "0.attention.query_key_value.weight", "2.attention.key_layernorm.weight",
     "3.attention.kv_b_proj.weight", "2.mlp.experts.3.up_proj.weight", "1.mlp.gate.expert_bias"],
)  # fmt: skip
def test_what_ling_lacks_is_named(tmp_path, name):
    x = model()
    del x["model.layers." + name]
    with pytest.raises(GdnError, match=name.replace(".", r"\.")):
        port(save(tmp_path / "src", x, config()), tmp_path / "out", "jax")


def test_what_is_not_computed_is_said(tmp_path):
    pytest.importorskip("flax")
    from portable_gdn.checkpoint import load_layer

    with pytest.raises(GdnError, match="output gate is 'linear_silu'"):
        port(save(tmp_path / "silu", model(), config(use_linear_silu=True)), tmp_path / "never", "jax")
    scaled = config(rope_scaling={"type": "yarn", "factor": 4.0})
    port(save(tmp_path / "yarn", model(), scaled), tmp_path / "out", "jax")
    with pytest.raises(GdnError, match=r"positions are scaled \(yarn"):
        load_layer(tmp_path / "out", 1)
    with pytest.raises(GdnError, match="be one with linear attention: 0, 1, 2"):
        load_layer(tmp_path / "out", 3)


# --- the layer -------------------------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def base_slopes(n: int) -> list[float]:
    """As the models' own code computes them: by a start and a ratio, and by twice the heads where they are no power."""
    import math

    def of_power(m: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start * start**i for i in range(m)]

    if math.log2(n).is_integer():
        return of_power(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_power(closest) + base_slopes(2 * closest)[0::2][: n - closest]


def reference(
    x: dict[str, np.ndarray], layer: int, c: dict[str, Any], inputs: np.ndarray, H: int, D: int
) -> np.ndarray:
    """Lightning attention token by token in float64: inputs [T, E]."""
    w = lambda n: x[f"model.layers.{layer}.attention.{n}.weight"].astype(np.float64)  # noqa: E731
    T = len(inputs)
    norm = lambda t: t / np.sqrt((t * t).mean(-1, keepdims=True) + c["rms_norm_eps"])  # noqa: E731
    q, k, v = (inputs @ w("query_key_value").T).reshape(T, 3, H, D).transpose(1, 0, 2, 3)
    if c["use_qk_norm"]:
        q, k = norm(q) * w("query_layernorm"), norm(k) * w("key_layernorm")
    half = int(D * c["partial_rotary_factor"]) // 2
    for t in range(T):
        for n in range(half):
            angle = t * c["rope_theta"] ** (-n / half)
            for y in (q, k):
                one, other = y[t, :, n].copy(), y[t, :, n + half].copy()
                y[t, :, n] = one * np.cos(angle) - other * np.sin(angle)
                y[t, :, n + half] = other * np.cos(angle) + one * np.sin(angle)
    slope = np.array(base_slopes(H)) * (1 - (layer - 1) / (c["num_hidden_layers"] - 1) + 1e-5)
    state, out = np.zeros((H, D, D)), np.zeros((T, H, D))
    for t in range(T):
        state = state * np.exp(-slope)[:, None, None] + np.einsum("hk,hv->hkv", k[t], v[t])
        out[t] = np.einsum("hk,hkv->hv", q[t] * D**-0.5, state)
    groups = norm(out.reshape(T, c["group_norm_size"], -1)).reshape(T, -1)
    return (groups * w("g_norm") * sigmoid(inputs @ w("g_proj").T)) @ w("dense").T


@pytest.mark.parametrize(
    ("heads", "width", "layer", "changes"),
    [
        (4, 16, 0, {}),
        pytest.param(3, 16, 2, {"group_norm_size": 3, "rope_theta": 1e4}, marks=pytest.mark.slow),
        pytest.param(
            6, 8, 1, {"group_norm_size": 1, "partial_rotary_factor": 1.0, "use_qk_norm": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_layer_is_the_published_formula(tmp_path, heads, width, layer, changes):
    """Rows with padding on either side, a sequence in two, and then token by token."""
    pytest.importorskip("flax")
    import jax
    import jax.numpy as jnp

    from portable_gdn.checkpoint import load_layer

    c = config(heads, width, **changes)
    x = model(heads, width, c["use_qk_norm"])
    port(save(tmp_path / "src", x, c), tmp_path / "out", "nnx")
    highest = jax.lax.Precision.HIGHEST
    ours = load_layer(
        tmp_path / "out", layer, dtype=jnp.float32, precision="highest", projection_precision=highest, backend="xla"
    )
    inputs = np.random.default_rng(1).standard_normal((70, E)).astype(np.float32)
    want = reference(x, layer, c, inputs.astype(np.float64), heads, width)
    error = lambda y: np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)  # noqa: E731
    rows = np.stack([np.pad(inputs, ((0, 5), (0, 0)), constant_values=9), np.pad(inputs, ((5, 0), (0, 0)))])
    mask = np.stack([np.arange(75) < 70, np.arange(75) >= 5])
    y, _ = ours(rows, mask=mask)
    assert error(y[0, :70]) < 1e-5
    assert error(y[1, 5:]) < 1e-5
    first, state = ours(inputs[None, :34], output_final_state=True)
    second, state = ours(inputs[None, 34:68], state=state, output_final_state=True)
    got = [first[0], second[0]]
    for t in (68, 69):
        y, state = ours.step(inputs[None, t], state)
        got.append(y)
    assert error(np.concatenate([np.asarray(y) for y in got])) < 1e-5
    with pytest.raises(GdnError, match=r"must have shape \[B, E\]"):
        ours.step(inputs[None], state)
