"""The compiled parts of generation: a whole prompt, the choice of the next token, and a single step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .cache import Cache
from .sampling import pick

__all__ = ["Drawing", "begin", "choose", "follow", "prefill"]

Array = Any
Drawing = tuple[Array, Array, Array | None, Array]


@partial(jax.jit, static_argnames=("graph", "room"))
def prefill(graph: Any, weights: Any, ids: Array, mask: Array | None, room: int) -> tuple[Array, Cache]:
    """Compute the logits [B, V] after the last token of the prompts, and the cache."""
    model = nnx.merge(graph, weights)
    x, cache = model.hidden(ids, mask, model.init_cache(ids.shape[0], room))
    return model.logits(x[:, -1]), cache


def choose(
    n: Array | int, logits: Array, last: Array, done: Array, drawing: Drawing, greedy: bool, top_k: int | None
) -> tuple[Array, Array]:
    """Choose token n of each row [B], repeating the last token of finished rows, and say which rows are finished."""
    key, temperature, top_p, stops = drawing
    token = pick(logits, jax.random.fold_in(key, n), greedy, temperature, top_k, top_p)
    token = jnp.where(done, last, token)
    return token, done | jnp.any(token[:, None] == stops, axis=-1)


@partial(jax.jit, static_argnames=("greedy", "top_k"))
def begin(logits: Array, drawing: Drawing, greedy: bool, top_k: int | None) -> tuple[Array, Array]:
    """Choose the first token of each row from the prompts' last logits [B, V], and say which rows end with it."""
    B = logits.shape[0]
    return choose(0, logits, jnp.zeros((B,), jnp.int32), jnp.zeros((B,), bool), drawing, greedy, top_k)


@partial(jax.jit, static_argnames=("graph", "greedy", "top_k"), donate_argnames=("cache",))
def follow(
    graph: Any,
    weights: Any,
    before: tuple[Array, Array, Array],
    cache: Cache,
    drawing: Drawing,
    greedy: bool,
    top_k: int | None,
) -> tuple[Array, Array, Cache]:
    """Compute the next token of each row [B], which rows are finished, and the cache, which reuses the given memory.

    Args:
        graph, weights: The two parts of ``nnx.split(model)``.
        before: The number of generated tokens, the last one of each row, and which rows were finished.
        cache: The cache without these last tokens.
        drawing, greedy, top_k: As in ``Request``.
    """
    n, token, done = before
    logits, cache = nnx.merge(graph, weights)(token[:, None], None, cache)
    token, done = choose(n, logits[:, 0], token, done, drawing, greedy, top_k)
    return token, done, cache
