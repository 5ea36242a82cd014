"""Choose the next token from its logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["pick"]

Array = Any


def pick(logits: Array, key: Array, greedy: bool, temperature: Array, top_k: int | None, top_p: Array | None) -> Array:
    """Choose one token for each row.

    Args:
        logits: [B, V].
        key: A key of jax.random; not used if greedy.
        greedy: Whether to take the most likely token, and the first among equals.
        temperature: The divisor of the logits.
        top_k: Sample from this number of most likely tokens; None is all.
        top_p: Of these, sample from the smallest set whose probabilities add up to at least this; None is all.

    Returns:
        [B] int32.
    """
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    count = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    scores, tokens = jax.lax.top_k(logits.astype(jnp.float32) / temperature, count)
    if top_p is not None:
        shares = jax.nn.softmax(scores, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares  # of those that are likelier
        scores = jnp.where((before < top_p).at[:, 0].set(True), scores, -jnp.inf)
    drawn = jax.random.categorical(key, scores, axis=-1)
    return jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
