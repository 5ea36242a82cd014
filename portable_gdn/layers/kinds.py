"""The layer class for each kind of mixer that checkpoints and models name, and the options that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..spec.errors import bad
from .gated_delta_net import GatedDeltaNet
from .gated_delta_net2 import GatedDeltaNet2
from .kimi_delta_attention import KimiDeltaAttention

__all__ = ["layer_of_kind"]

_ALL = (
    "num_heads", "num_value_heads", "key_dim", "value_dim", "gate", "norm_eps", "beta_scale", "conv_size", "conv_bias",
)  # fmt: skip
_KINDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "gdn": (GatedDeltaNet, ()),
    "kda": (KimiDeltaAttention, ("decay_rank", "gate_rank", "gate_bias", "lower_bound")),
    "gdn2": (GatedDeltaNet2, ("decay_rank", "gate_rank", "gate_bias")),
}
"""The layer of each kind, and its options beside those that all have."""


def layer_of_kind(kind: str, settings: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class for a kind of mixer ("gdn", "kda" or "gdn2"), and those of the settings that it takes.

    Raises:
        GdnError: The kind is unknown.
    """
    if kind not in _KINDS:
        raise bad("settings.mixer.kind", repr(kind), f"be one of {', '.join(_KINDS)}")
    layer, more = _KINDS[kind]
    return layer, {name: settings[name] for name in (*_ALL, *more)}
