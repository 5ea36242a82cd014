"""Generate text: the prompt in one pass, then one token at a time in a compiled loop."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..spec.errors import suggests_keywords
from .cache import Cache
from .decoder import Decoder
from .request import requested
from .stepping import Drawing, begin, choose, prefill

__all__ = ["Generated", "generate"]

Array = Any


class Generated(NamedTuple):
    """New tokens, without the prompt."""

    tokens: Array
    """[B, max_new_tokens] int32; after a row's stop token, that token again."""
    lengths: Array
    """[B] int32: how many of a row count, its stop token among them."""


@suggests_keywords
def generate(
    model: Decoder,
    ids: Array,
    max_new_tokens: int,
    *,
    mask: Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Iterable[int] | None = None,
    rng: int | Array | None = None,
    cache_length: int | None = None,
) -> Generated:
    """Continue prompts.

    The prompt is computed in one pass, with a program for each prompt length. All tokens after it come from one
    compiled loop, which ends when every row has stopped. Another call with the same shapes and settings compiles
    nothing. ``stream`` yields the same tokens one by one.

    Args:
        model: A ``Decoder``, for example from ``load_model``.
        ids: [B, T], prompts padded on the left.
        max_new_tokens: The largest number of tokens to generate.
        mask: [B, T], False (or 0) at padding; None is no padding.
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k: Sample from this number of most likely tokens only.
        top_p: Sample from the smallest set of most likely tokens whose probabilities add up to at least this.
        stop: One or several tokens; a row ends with the first of them that it generates.
        rng: A seed or a key of ``jax.random``, required if the temperature is above 0.
        cache_length: The number of tokens for which the cache has room, including a prompt's padding; None is enough
            for all, rounded up to a multiple of 128.

    Raises:
        GdnError: An argument is wrong, or ids are outside the vocabulary.
    """
    asked = requested(model, ids, max_new_tokens, mask, (temperature, top_k, top_p, rng), stop, cache_length)
    graph, weights = nnx.split(model)
    logits, cache = prefill(graph, weights, asked.ids, asked.mask, asked.room)
    tokens, lengths, _ = _continue(graph, weights, logits, cache, asked.drawing, asked.count, asked.greedy, asked.top_k)
    return Generated(tokens, lengths)


@partial(jax.jit, static_argnames=("graph", "count", "greedy", "top_k"), donate_argnames=("cache",))
def _continue(
    graph: Any,
    weights: Any,
    logits: Array,
    cache: Cache,
    drawing: Drawing,
    count: int,
    greedy: bool,
    top_k: int | None,
) -> tuple[Array, Array, Cache]:
    """Return tokens [B, count] and lengths [B], beginning from the prompts' last logits, and the cache.

    The cache reuses the memory of the given one.
    """

    def more(carry: Any) -> Array:
        n, _, _, done, _, _ = carry
        return (n < count) & ~jnp.all(done)

    def step(carry: Any) -> Any:
        n, token, cache, done, tokens, lengths = carry
        logits, cache = nnx.merge(graph, weights)(token[:, None], None, cache)
        lengths = lengths + ~done
        token, done = choose(n, logits[:, 0], token, done, drawing, greedy, top_k)
        return n + 1, token, cache, done, tokens.at[:, n].set(token), lengths

    B = logits.shape[0]
    token, done = begin(logits, drawing, greedy, top_k)
    tokens = jnp.zeros((B, count), jnp.int32).at[:, 0].set(token)
    carry = (jnp.int32(1), token, cache, done, tokens, jnp.ones((B,), jnp.int32))
    n, token, cache, _, tokens, lengths = jax.lax.while_loop(more, step, carry)
    return jnp.where(jnp.arange(count) < n, tokens, token[:, None]), lengths, cache  # where all stopped before the end
