"""What a decoder keeps of the tokens before: keys and values of attention, states of the mixers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..api import MixerState

__all__ = ["KV", "Cache", "Latents"]

Array = Any


class KV(NamedTuple):
    """Keys (rotated) and values of a layer, [B, L, Hkv, D]; L is fixed, places after the last token hold zeros."""

    k: Array
    v: Array

    def with_tokens(self, k: Array, v: Array, start: Array | int) -> KV:
        """Put those of new tokens, [B, T, Hkv, D], from place ``start`` on."""
        return KV(_put(self.k, k, start), _put(self.v, v, start))


class Latents(NamedTuple):
    """What latent attention keeps of a layer's tokens, [B, L, rank + shared_dim]: the normalised latent vector, from
    which keys and values of all heads follow, and the part of the keys that heads share."""

    both: Array

    def with_tokens(self, both: Array, start: Array | int) -> Latents:
        """Put those of new tokens, [B, T, rank + shared_dim], from place ``start`` on."""
        return Latents(_put(self.both, both, start))


def _put(all_: Array, new: Array, start: Array | int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(all_, new.astype(all_.dtype), start, 1)


class Cache(NamedTuple):
    """A pytree of fixed shapes, as ``Decoder.init_cache`` makes it and every call returns it anew."""

    layers: tuple[KV | Latents | MixerState, ...]
    """A layer's KV [B, L, Hkv, D], or its mixer's state, float32, of a size that no token changes; for all layers."""
    seen: Array
    """[B, L] bool: places that hold a token and no padding."""
    used: Array
    """int32 scalar: places that are filled, padding among them."""

    @property
    def length(self) -> int:
        """L, for how many tokens there is room."""
        return self.seen.shape[1]

    def positions(self) -> Array:
        """[B] int32: how many unpadded tokens each row holds, which is the next one's position."""
        return jnp.sum(self.seen, axis=1, dtype=jnp.int32)
