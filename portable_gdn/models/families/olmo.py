"""OLMo-Hybrid: norms after attention and MLP in layers of softmax attention, before them in linear ones."""

from __future__ import annotations

from ...spec.errors import bad
from ..settings import AttentionSettings, DecoderSettings
from .rotary import rotary
from .source import Source

__all__ = ["olmo"]

DEFAULT_THETA = 1e4


def olmo(source: Source) -> DecoderSettings:
    """The settings of a port of this family."""
    linear = source.linear()
    dense = (True,) * len(linear)
    source.refuse("hidden_act", ("silu", "swish"), "no other activation is computed here")
    if source.text.get("attention_bias"):
        raise bad("config.json's attention_bias", "true", "be false: no biases are known of this family")
    eps = source.get("rms_norm_eps", default=1e-6)
    return source.decoder(
        dense,
        norm_eps=eps,
        zero_centred=False,
        attention=None if all(linear) else _attention(source, eps),
        experts=None,
        post_norm=True,
    )


def _attention(source: Source, eps: float) -> AttentionSettings:
    heads = source.count("num_attention_heads")
    dim = source.count("hidden_size") // heads
    text = source.text
    said = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    # Released models have no positions: their rope_parameters are {"rope_theta": null}. Where nothing is said, as by
    # null in place of these, transformers takes 10000.
    turned = said.get("rope_theta", DEFAULT_THETA) is not None
    channels, theta = rotary(source, dim, 1.0, DEFAULT_THETA) if turned else (0, DEFAULT_THETA)
    return AttentionSettings(
        num_heads=heads,
        num_kv_heads=source.get("num_key_value_heads") or heads,
        head_dim=dim,
        rotary_dim=channels,
        rope_theta=theta,
        gated=False,
        qk_norm="whole",
        norm_eps=eps,
    )
