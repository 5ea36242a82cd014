"""Whole models of flash-linear-attention on a CPU: norms, MLP and attention of transformers around the mixer that the
proof of ports has, put together as FLA's models are. Rows have no padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from portable_gdn.checkpoint.proof.oracle import _module
from portable_gdn.checkpoint.reader import Checkpoint
from portable_gdn.checkpoint.source import read

__all__ = ["reference"]


def reference(folder: Path, ids: list[int]) -> np.ndarray:
    """The logits [T, V] of one row."""
    checkpoint = Checkpoint(folder)
    source, config = read(checkpoint), checkpoint.config
    eps = config.get("norm_eps", 1e-6)

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(checkpoint.array(name), np.float32))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = LlamaRMSNorm(x.shape[-1], eps)
        module.weight.data = weight(name)
        return module(x)

    def mlp(at: str, x: torch.Tensor) -> torch.Tensor:
        rows = weight(at + "gate_proj.weight").shape[0]
        return _filled(LlamaMLP(LlamaConfig(hidden_size=x.shape[-1], intermediate_size=rows)), at)(x)

    def _filled(module: Any, at: str) -> Any:
        names = {name for name in checkpoint.where if name.startswith(at)}
        for name, old in module.state_dict().items():
            new = weight(at + name) if at + name in names else torch.zeros_like(old)
            module.get_parameter(name).data = new
            names.discard(at + name)
        assert not names
        return module

    def attention(number: int, x: torch.Tensor) -> torch.Tensor:
        part, at = config["attn"], f"model.layers.{number}.attn."
        heads, width = part["num_heads"], x.shape[-1]
        settings = Qwen3Config(
            hidden_size=width, num_attention_heads=heads, num_key_value_heads=part.get("num_kv_heads") or heads,
            head_dim=width // heads, attention_bias=True, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": part.get("rope_theta", 1e4)},
        )  # fmt: skip
        settings._attn_implementation = "eager"
        module = Qwen3Attention(settings, 0)
        if not part.get("qk_norm"):
            module.q_norm = module.k_norm = torch.nn.Identity()
        T = x.shape[1]
        back = torch.arange(T)[:, None] - torch.arange(T)
        hidden = (back < 0) | (back >= (part.get("window_size") or T))
        mask = torch.zeros(1, 1, T, T).masked_fill(hidden, -torch.inf)
        positions = Qwen3RotaryEmbedding(settings)(x, torch.arange(T)[None])
        return _filled(module, at)(x, positions, mask)[0]

    with torch.no_grad():
        x = weight("model.embeddings.weight")[torch.tensor(ids)][None]
        for number in range(config["num_hidden_layers"]):
            at = f"model.layers.{number}."
            h = norm(at + "attn_norm.weight", x)
            x = x + (_module(source, number)(h, None)[0] if number in source.linear_layers else attention(number, h))
            x = x + mlp(at + "mlp.", norm(at + "mlp_norm.weight", x))
        head = "model.embeddings.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
        return (norm("model.norm.weight", x) @ weight(head).T)[0].numpy()
