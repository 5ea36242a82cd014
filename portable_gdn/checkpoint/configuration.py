"""Checks of config.json: the types of all settings that are read, and whether sizes agree with the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..spec.errors import GdnError, bad
from .families.family import Family
from .families.qwen import text_config
from .table import Key, Place

__all__ = ["check_config", "check_mixer", "check_sizes", "text_config", "tied"]


def tied(config: Mapping[str, Any], default: bool) -> bool:
    """Whether the head shares its weight with the embedding."""
    said = [part["tie_word_embeddings"] for part in (config, text_config(config)) if "tie_word_embeddings" in part]
    return any(said) if said else default


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _number(x: Any) -> bool:
    return _whole(x) or (isinstance(x, float) and math.isfinite(x))


_Kind = tuple[Callable[[Any], bool], str]
_COUNT: _Kind = (lambda x: x is None or (_whole(x) and 0 <= x < 2**31), "be a whole number")
_SIZE: _Kind = (lambda x: x is None or (_whole(x) and 0 < x < 2**31), "be a positive whole number")
_FEW: _Kind = (lambda x: x is None or (_whole(x) and 0 < x <= 10**4), "be a positive whole number, at most 10000")
_SOME: _Kind = (lambda x: x is None or (_whole(x) and 0 <= x <= 10**5), "be a whole number, at most 100000")
_EPS: _Kind = (lambda x: _number(x) and x > 0, "be a positive number")
_NUMBER: _Kind = (lambda x: x is None or _number(x), "be a number")
_REAL: _Kind = (_number, "be a number")
_SWITCH: _Kind = (lambda x: isinstance(x, bool), "be true or false")
_FLAG: _Kind = (lambda x: x is None or isinstance(x, bool), "be true or false")
_TEXT: _Kind = (lambda x: x is None or isinstance(x, str), "be a string")
_TEXTS: _Kind = (
    lambda x: x is None or (isinstance(x, list) and all(isinstance(item, str) for item in x)),
    "be a list of strings",
)
_NUMBERS: _Kind = (
    lambda x: x is None or (isinstance(x, list) and all(_whole(item) and item >= 0 for item in x)),
    "be a list of whole numbers",
)
_PART: _Kind = (lambda x: x is None or isinstance(x, Mapping), "be an object")
_PARTS: _Kind = (
    lambda x: (
        x is None or isinstance(x, Mapping) or (isinstance(x, list) and all(isinstance(item, Mapping) for item in x))
    ),
    "be an object or a list of objects",
)

_SETTINGS: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
            "num_kv_heads", "num_heads", "num_v_heads", "linear_num_key_heads", "linear_num_value_heads",
            "linear_key_head_dim", "linear_value_head_dim", "linear_num_heads", "linear_head_dim",
            "linear_conv_kernel_dim", "short_conv_kernel_size", "conv_size", "full_attention_interval",
            "layer_group_size", "decoder_sparse_step", "kv_lora_rank",
        ),
        _SIZE,
    ),
    **dict.fromkeys(
        (
            "head_dim", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
            "n_shared_experts", "num_shared_experts", "first_k_dense_replace", "q_lora_rank",
        ),
        _COUNT,
    ),
    "num_hidden_layers": _FEW,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), _SOME),
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), _EPS),
    **dict.fromkeys(
        ("expand_v", "lower_bound", "gate_lower_bound", "linear_lower_bound"), _NUMBER
    ),
    "kda_lower_bound": _REAL,
    **dict.fromkeys(("use_gate", "use_short_conv", "kda_safe_gate", "linear_allow_neg_eigval"), _SWITCH),
    **dict.fromkeys(
        (
            "tie_word_embeddings", "conv_bias", "safe_gate", "allow_neg_eigval", "qkv_bias", "qk_norm",
            "attention_bias",
        ),
        _FLAG,
    ),
    **dict.fromkeys(("model_type", "hidden_act", "output_gate_type", "output_gate_activation"), _TEXT),
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), _TEXTS),
    **dict.fromkeys(("mlp_only_layers", "kda_layers", "full_attn_layers", "layers"), _NUMBERS),
    **dict.fromkeys(("text_config", "vision_config", "quantization_config", "linear_attn_config"), _PART),
    "attn": _PARTS,
}  # fmt: skip
_INSIDE = ("text_config", "linear_attn_config", "attn")


def check_config(config: Mapping[str, Any], under: str = "config.json's ", depth: int = 3) -> None:
    """Check the types of the settings that are read, at any depth at which they may occur; other settings are ignored.

    Raises:
        GdnError: A setting has the wrong type, or two settings contradict each other.
    """
    for key, (fits, must) in _SETTINGS.items():
        if key in config and not fits(config[key]):
            raise bad(under + key, _shown(config[key]), must)
    for key in _INSIDE:
        inner = config.get(key)
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, Mapping) and depth:
                check_config(part, f"{under}{key}.", depth - 1)
    layers = config.get("num_hidden_layers")
    for key in ("layer_types", "mlp_layer_types"):
        kinds = config.get(key)
        if layers is not None and kinds is not None and len(kinds) != layers:
            raise bad(under + key, f"a list of {len(kinds)}", f"have num_hidden_layers = {layers} entries")
    for heads, values in (("linear_num_key_heads", "linear_num_value_heads"), ("num_heads", "num_v_heads")):
        if config.get(heads) and config.get(values) and config[values] % config[heads]:
            raise bad(under + values, config[values], f"be a multiple of {heads}, which is {config[heads]}")


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened for a message."""
    names = {"None": "null", "True": "true", "False": "false"}
    return names.get(repr(value), repr(value)[:60])


def _said(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int] | None:
    text = text_config(config)
    inner = text.get("linear_attn_config")
    for part, start in ((text, ""), (inner if isinstance(inner, Mapping) else {}, "linear_attn_config.")):
        for key in keys:
            if _whole(part.get(key)) and part[key] > 0:
                return start + key, part[key]
    return None


def check_sizes(
    family: Family, config: Mapping[str, Any], places: Mapping[Key, Place], sizes: Mapping[str, int]
) -> None:
    """Compare the sizes in the configuration with the shapes of the tensors.

    Raises:
        GdnError: They differ.
    """
    for dim, keys in family.says.items():
        said = _said(config, keys)
        if said is None or dim not in sizes or sizes[dim] == said[1]:
            continue
        bound = next((place.bound for place in places.values() if dim in place.bound.sizes), None)
        if bound is not None:
            raise GdnError(
                f"config.json's {said[0]} is {said[1]}, and {bound.name} has shape {list(bound.spec.shape)}, by which "
                f"it is {sizes[dim]}; configuration and tensors must agree."
            )


def check_mixer(family: Family, config: Mapping[str, Any]) -> None:
    """Check that our layers can compute what the configuration describes.

    Raises:
        GdnError: The linear layers have an activation or biases that our layers do not have.
    """
    act = text_config(config).get("hidden_act")
    if family.conv_activation and act not in (None, "silu", "swish"):
        raise bad(
            "config.json's hidden_act",
            repr(act),
            f"be 'silu': the convolution of {family.title}'s linear layers uses it, and ours have no other",
        )
    if family.conv_activation and text_config(config).get("attention_bias"):
        raise bad("config.json's attention_bias", "true", f"be false: of {family.title} no biases are known here")
    try:
        gate = family.mixer(config).gate
    except (KeyError, TypeError):
        return  # It does not say what the layers compute; only some targets need to know.
    if gate not in (None, "silu", "sigmoid"):
        raise bad("config.json's output gate", repr(gate), "be 'silu' (or 'swish') or 'sigmoid'")
