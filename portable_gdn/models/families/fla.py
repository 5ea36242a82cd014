"""flash-linear-attention's models: norms before, SwiGLU, and in hybrids attention with positions on all of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...spec.errors import GdnError, bad
from ..settings import AttentionSettings, DecoderSettings
from .source import Source

__all__ = ["fla"]

QK_NORM_EPS = 1e-5
"""What norms of queries and keys have, whatever norm_eps is."""


def fla(source: Source) -> DecoderSettings:
    """The settings of a port of one of these families."""
    linear = source.linear()
    dense = (True,) * len(linear)
    source.refuse("hidden_act", ("swish", "silu"), "no other activation is computed here")
    size = source.text.get("attnres_block_size")
    if size is not None:
        raise bad("config.json's attnres_block_size", size, "be null: attention residuals are not computed here")
    return source.decoder(
        dense,
        norm_eps=source.get("norm_eps", default=1e-6),
        zero_centred=False,
        attention=None if all(linear) else _attention(source, linear),
        experts=None,
    )


def _attention(source: Source, linear: tuple[bool, ...]) -> AttentionSettings:
    part = _settings(source.text.get("attn"), {number for number, one in enumerate(linear) if not one})
    heads = part.get("num_heads")
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise bad("config.json's attn.num_heads", repr(heads), "be a positive whole number")
    dim = source.size("embed.embedding", 1) // heads
    at = f"layers.{linear.index(False)}.attention."
    return AttentionSettings(
        num_heads=heads,
        num_kv_heads=part.get("num_kv_heads") or heads,
        head_dim=dim,
        rotary_dim=dim,
        rope_theta=source.number("attn.rope_theta", part.get("rope_theta", 1e4)),
        gated=False,
        qk_norm="head" if at + "q_norm.scale" in source.shapes else None,
        norm_eps=QK_NORM_EPS,
        bias=at + "q_proj.bias" in source.shapes,
        window=part.get("window_size"),
    )


def _settings(attn: Any, layers: set[int]) -> Mapping[str, Any]:
    """The settings of attention, which must be the same in all layers that have it."""
    parts = [part for part in (attn if isinstance(attn, list) else [attn]) if isinstance(part, Mapping)]
    used = [part for part in parts if layers & set(part.get("layers") or ())] or parts
    kinds = [{key: value for key, value in part.items() if key != "layers"} for part in used]
    if not kinds:
        raise GdnError("config.json says nothing of attention (attn), and some of the port's layers have it; it must.")
    if any(kind != kinds[0] for kind in kinds):
        raise bad("config.json's attn", "different for different layers", "be the same for all that have attention")
    return kinds[0]
