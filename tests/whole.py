"""What tests of whole models share: lively weights, prompts, ports of them, and transformers' logits."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import facts, save
from flax import nnx

from portable_gdn.checkpoint import port

LIMIT = 2e-5
MARGIN = 1e-3
PAD = 7
run = nnx.jit(lambda model, ids, mask=None, cache=None: model(ids, mask, cache))


VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, list[int] | None]]] = {
    "kimi_grouped": (
        "kimi_linear",
        {"num_expert_group": 4, "topk_group": 2, "q_lora_rank": 24},
        {
            "model.layers.3.self_attn.q_proj.weight": None,
            "model.layers.3.self_attn.q_a_proj.weight": [24, 64],
            "model.layers.3.self_attn.q_a_layernorm.weight": [24],
            "model.layers.3.self_attn.q_b_proj.weight": [96, 24],
        },
    ),
    "olmo_released": ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}}, {}),
    "olmo_rotary": (
        "olmo_hybrid",
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
        {
            "model.layers.3.self_attn.k_proj.weight": [32, 64],
            "model.layers.3.self_attn.v_proj.weight": [32, 64],
            "model.layers.3.self_attn.k_norm.weight": [32],
        },
    ),
    "fla_hybrid": (
        "fla_gated_deltanet",
        {
            "attn": {
                "layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "window_size": 9,
                "rope_theta": 3e4,
            },
            "allow_neg_eigval": True,
        },
        {
            "model.layers.1.attn.q_proj.bias": [64],
            "model.layers.1.attn.k_proj.bias": [32],
            "model.layers.1.attn.v_proj.bias": [32],
            "model.layers.1.attn.q_norm.weight": [16],
            "model.layers.1.attn.k_norm.weight": [16],
        },
    ),
    "fla_tied": ("fla_gated_deltanet_ungated", {}, {"lm_head.weight": None}),
    "fla_gdn2": (
        "fla_kda",
        {"model_type": "gated_deltanet2"},
        {"model.layers.0.attn.b_proj.weight": [64, 64], "model.layers.0.attn.w_proj.weight": [64, 64]},
    ),
}  # fmt: skip
"""Checkpoints like those of ``checkpoints.facts``: which, changes of its configuration, and of its tensors' shapes."""


SEEDS = {"kimi_grouped": 6, "olmo_released": 8, "olmo_rotary": 6, "fla_gated_deltanet": 6, "fla_kda": 6}
"""Where greedy tokens of other weights come near a tie."""


def described(name: str) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Shapes and configuration of a family's checkpoint, or of a variant."""
    like, config, shapes = VARIANTS.get(name, (name, {}, {}))
    found = facts(like)
    tensors = {key: shape for key, shape in {**found["tensors"], **shapes}.items() if shape is not None}
    return tensors, {**found["config"], **config}


def lively(name: str) -> dict[str, np.ndarray]:
    """Weights that show every fault: wide enough that logits differ by far more than a tie's width, no norm at 0 or 1,
    routers that prefer."""
    rng = np.random.default_rng(SEEDS.get(name, 5))
    found = {}
    for key, shape in described(name)[0].items():
        a = rng.standard_normal(shape)
        if key.endswith("A_log"):
            a = np.log(rng.uniform(1, 16, shape))
        elif key.endswith("dt_bias"):
            a = a - 3
        elif "norm" in key:
            a = 0.3 * a + (0 if name.startswith("qwen") and "linear_attn.norm" not in key else 1)
        elif key.endswith("e_score_correction_bias"):
            a = 0.3 * a
        elif "conv1d" in key:
            a = 0.5 * a
        elif "kv_a_proj" in key:
            a = 0.1 * a * shape[-1] ** -0.5  # so small that the eps of the norm behind it shows
        elif key.endswith(("embed_tokens.weight", "embeddings.weight")):
            a = 0.3 * a
        else:
            a = 1.2 * a * shape[-1] ** -0.5
        found[key] = a.astype(np.float32)
    return found


def prompts(seed: int = 0, length: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts, the second padded on the left."""
    ids = np.random.default_rng(seed).integers(3, 256, (2, length))
    mask = np.ones(ids.shape, bool)
    mask[1, :PAD], ids[1, :PAD] = False, 0
    return ids, mask


def error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def ported(base: Path, name: str) -> Path:
    """A port of a family's lively weights; its source lies beside it as ``src``."""
    (base / name).mkdir()
    port(save(base / name / "src", lively(name), described(name)[1]), base / name / "out", "jax")
    return base / name / "out"


def plain_transformers():
    """The library, for a fixture; where FLA is installed, its kernels, which need a GPU, are not called."""
    pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    rules = (
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid"):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            for rule in filter(lambda rule: hasattr(module, rule), rules):
                patch.setattr(module, rule, inspect.unwrap(getattr(module, rule)))
        yield library


def original(source: Path, dtype: str = "float32"):
    """transformers' model of a folder, by its plain code."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


@cache
def original_logits(source: Path) -> np.ndarray:
    import torch

    ids, mask = (torch.from_numpy(a) for a in prompts())
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return original(source)(ids, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits.numpy()


def original_tokens(source: Path, count: int) -> np.ndarray:
    """What transformers continues the prompts with, greedily; no two tokens are nearer to each other than a tie."""
    import torch

    ids, mask = prompts()
    with torch.no_grad():
        out = original(source).generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask).long(), max_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = torch.stack(out.logits, 1).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > MARGIN
    found = out.sequences[:, ids.shape[1] :].numpy()
    assert len(np.unique(found)) > count // 4
    return found


def distance(model, source: Path) -> float:
    ids, mask = prompts()
    return error(np.asarray(run(model, ids, mask)[0])[mask], original_logits(source)[mask])
