"""Describe a model that belongs to no supported family, by its model_type and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..spec.errors import GdnError
from .families import ALL, Family, family_named

__all__ = ["model_types", "no_linear_layer", "unknown_model"]

_KINDS: tuple[tuple[str, str], ...] = (
    (r"granitemoehybrid|granite_?4.*", "Mamba-2 and attention (Granite 4)"),
    (r"falcon_h1.*", "Mamba-2 and attention in parallel (Falcon-H1)"),
    (r"nemotron_?h.*", "Mamba-2 and attention (Nemotron-H)"),
    (r"bamba|zamba2?|jamba|plamo2|hymba|samba|codestral_mamba", "Mamba and attention"),
    (r"mamba2|mamba3|log_linear_mamba2", "Mamba-2"),
    (r"mamba|falcon_mamba", "Mamba"),
    (r"lfm2.*", "gated short convolutions and attention (LFM2)"),
    (r"minimax(_m1)?|minimax_text.*", "lightning attention and softmax attention (MiniMax)"),
    (r"minimax_m2.*", "plain attention (MiniMax-M2)"),
    (r"recurrent_gemma", "RG-LRU and local attention (RecurrentGemma)"),
    (r"xlstm.*", "xLSTM"),
    (r"rwkv.*", "RWKV"),
    (r"retnet", "retention"),
    (r"gla|hgrn2?|gsa|linear_attn|lightnet|rodimus|abc|cyfa", "linear attention without a delta rule"),
    (
        r"delta_net|gated_deltaproduct|comba|mesa_net|deltaformer|precond_\w+|path_attn|mom|raven",
        "a delta rule of another form",
    ),
    (r"bailing_moe_(linear|v2_5)|ring.*", "lightning attention and softmax attention (Ling 2.5, Ring)"),
    (r"deepseek_v(2|3|32|4).*|glm_moe_dsa|kimi_k2.*|longcat.*", "multi-head latent attention in every layer"),
    (
        r"(llama|mistral|mixtral|ministral|qwen|olmo|gemma|phi|glm|granite|gpt|deepseek|cohere|command|starcoder|falcon"
        r"|smollm|exaone|ernie|hunyuan|internlm|baichuan|yi|stablelm|mpt|bloom|opt|nemotron|seed_oss|apertus|arcee"
        r"|bailing_moe|dots|helium|jetmoe|persimmon|solar|bert|t5|llava|pixtral|paligemma|idefics|mllama).*",
        "plain attention",
    ),
)
"""Model types, as patterns, and what their layers are; the first that fits counts."""

_NAMES: tuple[tuple[str, str], ...] = (
    (r".*\.(mamba|mamba_\w+|ssm|mixer)\.(A_log|A|D|in_proj.*|x_proj.*|dt_bias|dt_proj.*)", "Mamba layers"),
    (r".*\.(x_r|time_decay|time_faaaa|time_mix_\w+|receptance)(\..*)?", "RWKV layers"),
    (r".*\.(rg_lru|recurrent_block)\..*", "RG-LRU layers"),
    (r".*\.(igate_preact|fgate_preact|ogate_preact|mlstm_layer|slstm_layer)\..*", "xLSTM layers"),
    (r".*\.kv_a_proj_with_mqa\..*", "multi-head latent attention"),
    (r".*\.(q_proj|k_proj|qkv_proj|query_key_value|c_attn|Wqkv)\..*", "plain attention"),
)
"""Tensors by their names, and what has them, for model types that are not listed."""


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the model_type of a configuration and that of the text model inside it."""
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    return list(dict.fromkeys(part["model_type"] for part in parts if isinstance(part.get("model_type"), str)))


def _what(config: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a description of the model's layers, or "" if nothing identifies them."""
    for said in model_types(config):
        for pattern, what in _KINDS:
            if re.fullmatch(pattern, said) and family_named(said) is None:
                return what
    for pattern, what in _NAMES:
        if any(re.fullmatch(pattern, name) for name in names):
            return f"{what}, by its tensors' names"
    return ""


def _known() -> str:
    return "the gated delta rule: " + "; ".join(family.title for family in ALL)


def unknown_model(folder: Path, config: Mapping[str, Any], names: Sequence[str], fits: Sequence[Family]) -> GdnError:
    """Return the error for a model whose model_type is not supported; ``fits`` are families whose tables have all its
    names.
    """
    said = model_types(config)
    what = _what(config, names)
    start = f"{folder} is of model_type {' with '.join(said)}" if said else f"{folder} has no model_type in config.json"
    if fits:
        options = " or ".join(f"--family {family.name}" for family in fits)
        return GdnError(
            f"{start}, which is not known here, and its tensors are named like those of "
            f"{' and '.join(family.title for family in fits)}; if it computes the same, {options} says so."
        )
    about = f": {what}" if what else ""
    return GdnError(f"{start}{about}. No such model is known here; it must be one of those with layers of {_known()}.")


def no_linear_layer(folder: Path, config: Mapping[str, Any], names: Sequence[str]) -> GdnError:
    """Return the error for a model without a linear-attention layer."""
    what = _what(config, names)
    about = f": {what}" if what else ""
    return GdnError(
        f"{folder} has no layer of linear attention{about}. It must be of a model with layers of {_known()}."
    )
