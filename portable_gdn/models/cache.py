"""The cache of a decoder: keys and values of attention layers, states of the mixers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..api import MixerState

__all__ = ["KV", "Cache", "Latents"]

Array = Any


class KV(NamedTuple):
    """The keys (after rotary embedding) and values of a layer, [B, L, Hkv, D].

    L is fixed; places after the last token hold zeros. Layers that share a compiled body are stacked: [layers, B, L,
    Hkv, D].
    """

    k: Array
    v: Array
    number: Array | None = None
    """Which of the stacked layers is meant, while it computes."""

    def with_tokens(self, k: Array, v: Array, start: Array | int) -> KV:
        """Write the keys and values of new tokens, [B, T, Hkv, D], from place ``start`` on."""
        return self._replace(k=_put(self.k, k, start, self.number), v=_put(self.v, v, start, self.number))

    def of_layer(self) -> tuple[Array, Array]:
        """Return the keys and values [B, L, Hkv, D] of one layer."""
        return _one(self.k, self.number), _one(self.v, self.number)


class Latents(NamedTuple):
    """The cache of latent attention for a layer, [B, L, rank + shared_dim].

    It holds the normalised latent vector of each token, from which the keys and values of all heads are computed, and
    the part of the keys that all heads share. Layers are stacked as in ``KV``.
    """

    both: Array
    number: Array | None = None
    """Which of the stacked layers is meant, while it computes."""

    def with_tokens(self, both: Array, start: Array | int) -> Latents:
        """Write the entries of new tokens, [B, T, rank + shared_dim], from place ``start`` on."""
        return self._replace(both=_put(self.both, both, start, self.number))

    def of_layer(self) -> Array:
        """Return the array [B, L, rank + shared_dim] of one layer."""
        return _one(self.both, self.number)


def _put(all_: Array, new: Array, start: Array | int, number: Array | None) -> Array:
    """Write tokens to their places; stacked layers write only these, so that a loop can update in place."""
    new = new.astype(all_.dtype)
    if number is None:
        return jax.lax.dynamic_update_slice_in_dim(all_, new, start, 1)
    zeros = (0,) * (all_.ndim - 3)
    return jax.lax.dynamic_update_slice(all_, new[None], (number, 0, start, *zeros))


def _one(all_: Array, number: Array | None) -> Array:
    return all_ if number is None else jax.lax.dynamic_index_in_dim(all_, number, 0, keepdims=False)


class Cache(NamedTuple):
    """A pytree with fixed shapes. ``Decoder.init_cache`` makes one, and every call returns an updated one."""

    layers: tuple[KV | Latents | MixerState, ...]
    """A layer's KV [B, L, Hkv, D], or its mixer's state, float32, of a size that no token changes; for all bodies of
    the decoder, with an axis in front where these are several layers."""
    seen: Array
    """[B, L] bool: places that hold a token and no padding."""
    used: Array
    """int32 scalar: places that are filled, padding among them."""

    @property
    def length(self) -> int:
        """L, the number of tokens for which the cache has room."""
        return self.seen.shape[1]

    def positions(self) -> Array:
        """[B] int32: the number of tokens in each row without padding, which is the position of the next one."""
        return jnp.sum(self.seen, axis=1, dtype=jnp.int32)
