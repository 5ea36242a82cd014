"""Whole models in JAX: load a ported checkpoint as a Flax NNX module, compute logits, and generate text.

    from portable_gdn.models import generate, load_model

    model = load_model("Qwen3.5-9B-jax")                # what `portable-gdn port ... --to jax` wrote
    logits, _ = model(ids)                              # ids [B, T] -> logits [B, T, V]
    tokens = generate(model, ids, max_new_tokens=64).tokens

One decoder serves all families. The differences between them are settings, ``DecoderSettings``, which ``load_model``
reads from the port's config.json. Parameters have the names of the port's leaves.
"""

from __future__ import annotations

from .cache import KV, Cache, Latents
from .decoder import Decoder
from .generation import Generated, generate
from .loading import end_tokens, load_model
from .saving import save_model
from .settings import AttentionSettings, DecoderSettings, ExpertSettings, LatentSettings, MixerSettings
from .streaming import Stream, stream

__all__ = [
    "KV",
    "AttentionSettings",
    "Cache",
    "Decoder",
    "DecoderSettings",
    "ExpertSettings",
    "Generated",
    "LatentSettings",
    "Latents",
    "MixerSettings",
    "Stream",
    "end_tokens",
    "generate",
    "load_model",
    "save_model",
    "stream",
]
