"""The compiled parts of writing: a prompt at once, the choice of its successor, one token more."""

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
    """The logits [B, V] after the last token of the prompts, and the cache."""
    model = nnx.merge(graph, weights)
    x, cache = model.hidden(ids, mask, model.init_cache(ids.shape[0], room))
    return model.logits(x[:, -1]), cache


def choose(
    n: Array | int, logits: Array, last: Array, done: Array, drawing: Drawing, greedy: bool, top_k: int | None
) -> tuple[Array, Array]:
    """Token n of each row, [B], the last one again where it is done, and which rows are done after it."""
    key, temperature, top_p, stops = drawing
    token = pick(logits, jax.random.fold_in(key, n), greedy, temperature, top_k, top_p)
    token = jnp.where(done, last, token)
    return token, done | jnp.any(token[:, None] == stops, axis=-1)


@partial(jax.jit, static_argnames=("greedy", "top_k"))
def begin(logits: Array, drawing: Drawing, greedy: bool, top_k: int | None) -> tuple[Array, Array]:
    """The first token of each row from the prompts' last logits [B, V], and which rows end with it."""
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
    """The next token of each row, [B], which rows are done after it, and the cache, in the given one's memory.

    Args:
        graph, weights: the model, split.
        before: how many tokens were written, the last one of each row, and which rows were done.
        cache: of all tokens but these.
        drawing, greedy, top_k: as in ``Request``.
    """
    n, token, done = before
    logits, cache = nnx.merge(graph, weights)(token[:, None], None, cache)
    token, done = choose(n, logits[:, 0], token, done, drawing, greedy, top_k)
    return token, done, cache
