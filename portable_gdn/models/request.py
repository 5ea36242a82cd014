"""What is asked for when text is to be written, checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..spec.errors import GdnError, bad
from .decoder import Decoder, checked_ids, checked_mask

__all__ = ["Request", "requested"]

Array = Any
ROOM = 128
"""The cache's length is a multiple of this, so that prompts of like lengths share what is compiled."""


@dataclass(frozen=True)
class Request:
    """Arguments of ``generate`` and ``stream`` as arrays, and what is static in compiled functions."""

    ids: Array
    mask: Array | None
    count: int
    """New tokens at most."""
    room: int
    """Length of the cache."""
    drawing: tuple[Array, Array, Array | None, Array]
    """key, temperature, top_p, and the tokens that end a row."""
    greedy: bool
    top_k: int | None


def requested(
    model: Decoder,
    ids: Array,
    max_new_tokens: int,
    mask: Array | None,
    sampling: tuple[float, int | None, float | None, int | Array | None],
    stop: int | Iterable[int] | None,
    cache_length: int | None,
) -> Request:
    """The request of these arguments, which are those of ``generate``; ``sampling`` is its temperature, top_k, top_p,
    and rng.

    Raises:
        GdnError: an argument is not as ``generate`` asks for.
    """
    temperature, top_k, top_p, rng = sampling
    if not isinstance(model, Decoder):
        raise bad("model", f"a {type(model).__name__}", "be a Decoder, such as load_model returns")
    ids = checked_ids(ids, model.settings.vocabulary)
    if mask is not None:
        mask = _left_padded(checked_mask(mask, ids.shape))
    _check_sampling(max_new_tokens, temperature, top_k, top_p)
    room = _room(cache_length, ids.shape[1], int(max_new_tokens))
    drawing = (
        _key(rng, temperature),
        jnp.float32(temperature or 1.0),
        None if top_p is None else jnp.float32(top_p),
        _stops(stop, model.settings.vocabulary),
    )
    return Request(ids, mask, int(max_new_tokens), room, drawing, temperature == 0, top_k)


def _room(cache_length: Any, prompt: int, count: int) -> int:
    if cache_length is None:
        return -(-(prompt + count) // ROOM) * ROOM
    if not _whole(cache_length) or cache_length < 1:
        raise bad("cache_length", repr(cache_length), "be None or a positive whole number")
    if cache_length < prompt + count:
        raise GdnError(
            f"cache_length is {cache_length}, and the prompt has {prompt} tokens, to which max_new_tokens adds "
            f"{count}; it must be at least {prompt + count}."
        )
    return int(cache_length)


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
