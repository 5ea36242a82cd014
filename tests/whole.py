"""What tests of whole models share: lively weights, prompts, ports of them, and transformers' logits."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from checkpoints import facts, save
from flax import nnx

from portable_gdn.checkpoint import port

LIMIT = 2e-5
MARGIN = 1e-3
PAD = 7
run = nnx.jit(lambda model, ids, mask=None, cache=None: model(ids, mask, cache))


def lively(name: str) -> dict[str, np.ndarray]:
    """Weights that show every fault: wide enough that logits differ by far more than a tie's width, no norm at 0 or 1,
    routers that prefer."""
    rng = np.random.default_rng(5)
    found = {}
    for key, shape in facts(name)["tensors"].items():
        a = rng.standard_normal(shape)
        if key.endswith("A_log"):
            a = np.log(rng.uniform(1, 16, shape))
        elif key.endswith("dt_bias"):
            a = a - 3
        elif "norm" in key:
            a = 0.3 * a + (1 if "linear_attn.norm" in key else 0)
        elif "conv1d" in key:
            a = 0.5 * a
        elif key.endswith("embed_tokens.weight"):
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
    port(save(base / name / "src", lively(name), facts(name)["config"]), base / name / "out", "jax")
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
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            for rule in rules:
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


def distance(model, source: Path) -> float:
    ids, mask = prompts()
    return error(np.asarray(run(model, ids, mask)[0])[mask], original_logits(source)[mask])
