"""Kimi-K3: its names and shapes, made small; its linear layers beside the published formula, written out in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import read_file, save_raw

from portable_gdn.checkpoint import back, port
from portable_gdn.spec.errors import GdnError

BF16 = ml_dtypes.bfloat16
E, H, D, LATENT, INNER, X, V = 64, 3, 16, 32, 32, 4, 64
CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": {
        "model_type": "kimi_linear", "hidden_size": E, "num_hidden_layers": 4, "vocab_size": V, "hidden_act": "situ",
        "num_attention_heads": H, "intermediate_size": 96, "moe_intermediate_size": INNER, "num_experts": X,
        "num_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_expert_hidden_size": LATENT,
        "q_lora_rank": 8, "kv_lora_rank": 16, "mla_use_output_gate": True, "rms_norm_eps": 1e-5,
        "attn_res_block_size": 2, "tie_word_embeddings": False,
        "linear_attn_config": {
            "num_heads": H, "head_dim": D, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3],
            "full_attn_layers": [4], "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    },
}  # fmt: skip


def model(padded: int = D) -> dict[str, np.ndarray]:
    """Tensors under the release's names: A_log with more numbers than heads, experts of latent width in MXFP4."""
    rng = np.random.default_rng(0)
    b = lambda *s: (rng.standard_normal(s) * s[-1] ** -0.5).astype(np.float32).astype(BF16)  # noqa: E731
    f = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    norm = lambda n: (1 + 0.1 * rng.standard_normal(n)).astype(np.float32).astype(BF16)  # noqa: E731
    top = "language_model."
    x = {
        top + "lm_head.weight": b(V, E), top + "model.embed_tokens.weight": b(V, E), top + "model.norm.weight": norm(E),
        top + "model.output_attn_res_norm.weight": norm(E), top + "model.output_attn_res_proj.weight": b(1, E),
        "vision_tower.encoder.blocks.0.norm0.weight": norm(8), "mm_projector.proj.0.weight": b(8, 8),
    }  # fmt: skip
    for n in range(4):
        p, s = f"{top}model.layers.{n}.", f"{top}model.layers.{n}.self_attn."
        for kind in ("self_attention_res", "mlp_res"):
            x |= {f"{p}{kind}_norm.weight": norm(E), f"{p}{kind}_proj.weight": b(1, E)}
        x |= {p + "input_layernorm.weight": norm(E), p + "post_attention_layernorm.weight": norm(E)}
        if n < 3:
            x |= {f"{s}{m}_proj.weight": b(H * D, E) for m in "qkvg"}
            x |= {f"{s}{m}_conv1d.weight": f(H * D, 1, 4) * 0.5 for m in "qkv"}
            x |= {s + "f_a_proj.weight": b(D, E), s + "f_b_proj.weight": b(H * D, D), s + "b_proj.weight": b(H, E)}
            x |= {s + "A_log": np.log(rng.uniform(1, 16, padded)).astype(np.float32), s + "dt_bias": f(H * D) - 3}
            x |= {s + "o_norm.weight": (1 + 0.1 * f(D)).astype(np.float32), s + "o_proj.weight": b(E, H * D)}
        else:
            x |= {s + "q_a_proj.weight": b(8, E), s + "q_a_layernorm.weight": norm(8), s + "q_b_proj.weight": b(72, 8)}
            x |= {s + "kv_a_proj_with_mqa.weight": b(24, E), s + "kv_a_layernorm.weight": norm(16)}
            x |= {s + "kv_b_proj.weight": b(96, 16), s + "o_proj.weight": b(E, 48), s + "g_proj.weight": b(48, E)}
        if n == 0:
            x |= {p + f"mlp.{m}_proj.weight": b(96, E) for m in ("gate", "up")}
            x |= {p + "mlp.down_proj.weight": b(E, 96)}
            continue
        m = p + "block_sparse_moe."
        x |= {m + "gate.weight": b(X, E), m + "gate.e_score_correction_bias": f(X)}
        x |= {m + "routed_expert_down_proj.weight": b(LATENT, E), m + "routed_expert_up_proj.weight": b(E, LATENT)}
        x |= {m + "routed_expert_norm.weight": norm(LATENT)}
        x |= {f"{m}shared_experts.{k}_proj.weight": b(2 * INNER, E) for k in ("gate", "up")}
        x |= {m + "shared_experts.down_proj.weight": b(E, 2 * INNER)}
        for e in range(X):
            for w, (out, inside) in {"w1": (INNER, LATENT), "w3": (INNER, LATENT), "w2": (LATENT, INNER)}.items():
                x[f"{m}experts.{e}.{w}.weight_packed"] = rng.integers(0, 256, (out, inside // 2)).astype(np.uint8)
                x[f"{m}experts.{e}.{w}.weight_scale"] = rng.integers(120, 130, (out, inside // 32)).astype(np.uint8)
    return x


def leaves(folder: Path) -> dict[str, np.ndarray]:
    return {n: a for p in sorted(folder.glob("*.safetensors")) for n, a in read_file(p).items()}


@pytest.mark.parametrize("padded", [H, H + 1, D])
def test_kimi_k3_there_and_back(tmp_path, padded):
    """The padding of A_log is no part of a layer and still comes back; experts stay as they are, in four bits."""
    x = model(padded)
    source = save_raw(tmp_path / "src", x, CONFIG)
    port(source, tmp_path / "out", "jax")
    back(tmp_path / "out", tmp_path / "back")
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    have = leaves(tmp_path / "out")
    at = "language_model.model.layers.1."
    assert np.array_equal(have["layers.1.mixer.A_log"], x[at + "self_attn.A_log"][:H])
    assert np.array_equal(have.get("layers.1.A_log_padding", np.zeros(0)), x[at + "self_attn.A_log"][H:])
    assert np.array_equal(have["layers.1.mixer.g_proj.kernel"].T, x[at + "self_attn.g_proj.weight"])
    assert np.array_equal(
        have["layers.3.attention.g_proj.kernel"].T, x[at.replace("1", "3") + "self_attn.g_proj.weight"]
    )
    for name in ("block_sparse_moe.experts.3.w2.weight_packed", "mlp_res_norm.weight"):
        assert np.array_equal(have[at + name], x[at + name])
    mixer = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())["mixer"]
    assert mixer["lower_bound"] == -5.0
    assert (mixer["num_heads"], mixer["key_dim"], mixer["gate"], mixer["norm_eps"]) == (H, D, "sigmoid", 1e-5)


def test_experts_can_be_dequantised(tmp_path):
    source = save_raw(tmp_path / "src", model(), CONFIG)
    port(source, tmp_path / "out", "jax", dequantise=True)
    have = leaves(tmp_path / "out")
    x = read_file(source / "model.safetensors")
    at = "language_model.model.layers.2.block_sparse_moe.experts.1.w2.weight"
    codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    nibbles = np.stack([x[at + "_packed"] & 15, x[at + "_packed"] >> 4], -1).reshape(LATENT, INNER)
    values = np.where(nibbles & 8, -1.0, 1.0) * np.array(codes)[nibbles & 7]
    want = values * np.repeat(2.0 ** (x[at + "_scale"].astype(np.float64) - 127), 32, 1)
    assert have[at].dtype == BF16
    assert np.array_equal(have[at].astype(np.float64), want)


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.self_attn.g_proj.weight",
        "layers.0.self_attn.A_log",
        "layers.3.self_attn.g_proj.weight",
        "layers.2.block_sparse_moe.experts.3.w1.weight_packed",
        "layers.2.mlp_res_proj.weight",
        "layers.1.block_sparse_moe.routed_expert_norm.weight",
    ],
)
def test_what_kimi_k3_lacks_is_named(tmp_path, name):
    x = model()
    del x["language_model.model." + name]
    with pytest.raises(GdnError, match=name.split(".", 2)[2].replace(".", r"\.")):
        port(save_raw(tmp_path / "src", x, CONFIG), tmp_path / "out", "jax")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference(x: dict[str, np.ndarray], layer: int, inputs: np.ndarray) -> np.ndarray:
    """KDA as Kimi-K3 defines it, token by token in float64: inputs [T, E]."""
    w = lambda n: x[f"language_model.model.layers.{layer}.self_attn.{n}"].astype(np.float64)  # noqa: E731
    T = len(inputs)

    def convolved(m: str) -> np.ndarray:
        raw = np.concatenate([np.zeros((3, H * D)), inputs @ w(f"{m}_proj.weight").T])
        y = sum(raw[t : t + T] * w(f"{m}_conv1d.weight")[:, 0, t] for t in range(4))
        return (y * sigmoid(y)).reshape(T, H, D)

    q, k, v = (convolved(m) for m in "qkv")
    q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
    f = (inputs @ w("f_a_proj.weight").T @ w("f_b_proj.weight").T + w("dt_bias")).reshape(T, H, D)
    g = -5.0 * sigmoid(np.exp(w("A_log")[:H])[:, None] * f)
    beta = sigmoid(inputs @ w("b_proj.weight").T)
    state, out = np.zeros((H, D, D)), np.zeros((T, H, D))
    for t in range(T):
        state = state * np.exp(g[t])[..., None]
        error = v[t] - np.einsum("hk,hkv->hv", k[t], state)
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        out[t] = np.einsum("hk,hkv->hv", q[t] * D**-0.5, state)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-5) * w("o_norm.weight")
    out = out * sigmoid(inputs @ w("g_proj.weight").T).reshape(T, H, D)
    return out.reshape(T, -1) @ w("o_proj.weight").T


def test_a_linear_layer_is_the_published_formula(tmp_path):
    pytest.importorskip("flax")
    import jax
    import jax.numpy as jnp

    from portable_gdn.checkpoint import load_layer

    x = model()
    port(save_raw(tmp_path / "src", x, CONFIG), tmp_path / "out", "nnx")
    highest = jax.lax.Precision.HIGHEST
    layer = load_layer(
        tmp_path / "out", 1, dtype=jnp.float32, precision="highest", projection_precision=highest, backend="xla"
    )
    inputs = np.random.default_rng(1).standard_normal((70, E)).astype(np.float32)
    want = reference(x, 1, inputs.astype(np.float64))
    y, state = layer(inputs[None, :67], output_final_state=True)
    got = [np.asarray(y[0], np.float64)]
    for t in range(67, 70):
        y, state = layer.step(inputs[None, t], state)
        got.append(np.asarray(y, np.float64))
    error = np.linalg.norm(np.concatenate(got) - want) / np.linalg.norm(want)
    assert error < 1e-5
