"""The options of a linear-attention layer, from what a port records about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["mixer_settings"]


def mixer_settings(mixer: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the options of a layer by name, including options that its kind of layer does not take.

    Args:
        mixer: The entry "mixer" of the port's portable_gdn.json.
        shapes: The shapes of one layer's leaves by their paths below the layer; they show which projections it has.
    """
    names = ("num_heads", "num_value_heads", "key_dim", "value_dim", "gate", "norm_eps", "beta_scale")
    conv = shapes.get("q_conv1d.kernel")
    ranks: dict[str, int | None] = {"decay_rank": None, "gate_rank": None}
    if mixer["kind"] != "gdn":
        for name, short in (("decay_rank", "f"), ("gate_rank", "g")):
            factor = shapes.get(f"{short}_a_proj.kernel")
            ranks[name] = factor[1] if factor else None
    return {
        **{name: mixer[name] for name in names},
        **ranks,
        "conv_size": conv[0] if conv else 0,
        "conv_bias": "q_conv1d.bias" in shapes,
        "gate_bias": "g_b_proj.bias" in shapes or "g_proj.bias" in shapes,
        "lower_bound": mixer["lower_bound"] if mixer["kind"] == "kda" else None,
    }
