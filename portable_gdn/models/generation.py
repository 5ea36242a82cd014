"""Text from a model: the prompt at once, then token by token in one compiled loop."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..spec.errors import GdnError, bad, suggests_keywords
from .cache import Cache
from .decoder import Decoder, checked_ids, checked_mask
from .sampling import pick

__all__ = ["Generated", "generate"]

Array = Any
ROOM = 128
"""The cache's length is a multiple of this, so that prompts of like lengths share the compiled loop."""


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
) -> Generated:
    """Continue prompts.

    The prompt runs at once, a program for each of its lengths; all tokens after it come from one compiled loop, which
    ends when every row has stopped. Called again with the same shapes and settings, nothing is compiled anew.

    Args:
        model: a ``Decoder``, such as ``load_model`` returns.
        ids: [B, T] prompts, padded on the left.
        max_new_tokens: how many tokens to write at most.
        mask: [B, T], False (or 0) at padding; None is no padding.
        temperature: 0 takes the likeliest token, 1 draws by the model's own shares.
        top_k: draw among so many of the likeliest only.
        top_p: draw among the fewest likeliest tokens whose shares add up to at least this.
        stop: a token or several; a row ends with the first of them that it writes.
        rng: a seed or a key of ``jax.random``, needed where temperature is above 0.

    Raises:
        GdnError: an argument is not as above, or ids are beyond the vocabulary.
    """
    if not isinstance(model, Decoder):
        raise bad("model", f"a {type(model).__name__}", "be a Decoder, such as load_model returns")
    ids = checked_ids(ids, model.settings.vocabulary)
    if mask is not None:
        mask = _left_padded(checked_mask(mask, ids.shape))
    _check_sampling(max_new_tokens, temperature, top_k, top_p)
    stops = _stops(stop, model.settings.vocabulary)
    key = _key(rng, temperature)

    graph, weights = nnx.split(model)
    room = -(-(ids.shape[1] + max_new_tokens) // ROOM) * ROOM
    logits, cache = _prefill(graph, weights, ids, mask, room)
    drawing = jnp.float32(temperature or 1.0), None if top_p is None else jnp.float32(top_p)
    tokens, lengths, _ = _continue(
        graph, weights, logits, cache, key, *drawing, stops, int(max_new_tokens), temperature == 0, top_k
    )
    return Generated(tokens, lengths)


@partial(jax.jit, static_argnames=("graph", "room"))
def _prefill(graph: Any, weights: Any, ids: Array, mask: Array | None, room: int) -> tuple[Array, Cache]:
    """The logits [B, V] after the last token of the prompts, and the cache."""
    model = nnx.merge(graph, weights)
    x, cache = model.hidden(ids, mask, model.init_cache(ids.shape[0], room))
    return model.logits(x[:, -1]), cache


@partial(jax.jit, static_argnames=("graph", "count", "greedy", "top_k"), donate_argnames=("cache",))
def _continue(
    graph: Any,
    weights: Any,
    logits: Array,
    cache: Cache,
    key: Array,
    temperature: Array,
    top_p: Array | None,
    stops: Array,
    count: int,
    greedy: bool,
    top_k: int | None,
) -> tuple[Array, Array, Cache]:
    """Tokens [B, count], lengths [B] from the prompts' last logits on, and the cache, which takes the given one's place
    in memory."""

    def choose(n: Array | int, logits: Array, last: Array, done: Array) -> tuple[Array, Array]:
        token = pick(logits, jax.random.fold_in(key, n), greedy, temperature, top_k, top_p)
        token = jnp.where(done, last, token)
        return token, done | jnp.any(token[:, None] == stops, axis=-1)

    def more(carry: Any) -> Array:
        n, _, _, done, _, _ = carry
        return (n < count) & ~jnp.all(done)

    def step(carry: Any) -> Any:
        n, token, cache, done, tokens, lengths = carry
        logits, cache = nnx.merge(graph, weights)(token[:, None], None, cache)
        lengths = lengths + ~done
        token, done = choose(n, logits[:, 0], token, done)
        return n + 1, token, cache, done, tokens.at[:, n].set(token), lengths

    B = logits.shape[0]
    token, done = choose(0, logits, jnp.zeros((B,), jnp.int32), jnp.zeros((B,), bool))
    tokens = jnp.zeros((B, count), jnp.int32).at[:, 0].set(token)
    carry = (jnp.int32(1), token, cache, done, tokens, jnp.ones((B,), jnp.int32))
    n, token, cache, _, tokens, lengths = jax.lax.while_loop(more, step, carry)
    return jnp.where(jnp.arange(count) < n, tokens, token[:, None]), lengths, cache  # where all stopped before the end


def _left_padded(mask: Array) -> Array:
    if not isinstance(mask, jax.core.Tracer):
        rows = np.asarray(mask)
        if not (rows[:, -1].all() and (rows[:, 1:] >= rows[:, :-1]).all()):
            row = int(np.argmin(rows[:, -1] & (rows[:, 1:] >= rows[:, :-1]).all(axis=1)))
            raise bad("mask", f"False after a token in row {row}", "be False before a row's first token only")
    return mask


def _check_sampling(max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any) -> None:
    if not _whole(max_new_tokens) or max_new_tokens < 1:
        raise bad("max_new_tokens", repr(max_new_tokens), "be a positive whole number")
    if not _number(temperature) or not 0 <= temperature < float("inf"):
        raise bad("temperature", repr(temperature), "be 0 or a positive number")
    if top_k is not None and (not _whole(top_k) or top_k < 1):
        raise bad("top_k", repr(top_k), "be None or a positive whole number")
    if top_p is not None and (not _number(top_p) or not 0 < top_p <= 1):
        raise bad("top_p", repr(top_p), "be None or a number above 0, at most 1")
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and temperature == 0:
            raise bad(name, repr(value), "be None where temperature is 0, which takes the likeliest token")


def _whole(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _number(x: Any) -> bool:
    return _whole(x) or isinstance(x, float | np.floating)


def _stops(stop: Any, vocabulary: int) -> Array:
    stops = [] if stop is None else [stop] if _whole(stop) else list(stop)
    for token in stops:
        if not _whole(token) or not 0 <= token < vocabulary:
            raise bad("stop", f"with {token!r}", f"hold tokens from 0 to {vocabulary - 1}, the vocabulary's last")
    return jnp.array(stops, jnp.int32)


def _key(rng: Any, temperature: float) -> Array:
    if rng is None:
        if temperature:
            raise GdnError(f"rng is None, and temperature is {temperature}; to draw tokens it must be a seed or a key.")
        return jax.random.key(0)
    if _whole(rng):
        return jax.random.key(int(rng))
    if not isinstance(rng, jax.Array):
        raise bad("rng", f"a {type(rng).__name__}", "be a seed or a key of jax.random")
    return rng
