"""Softmax attention of a decoder layer: grouped heads, norms of q and k, partial rotary embedding, output gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .blocks import Norm
from .cache import KV
from .numerics import Numerics
from .settings import AttentionSettings

__all__ = ["Attention", "attend", "rotated"]

Array = Any
QUERIES = 512
"""Queries whose scores are in memory at a time."""


def rotated(x: Array, positions: Array, theta: float, channels: int) -> Array:
    """Apply the rotary embedding to the first channels of each head; channel i is paired with channel i + channels / 2.

    Args:
        x: [B, T, H, D].
        positions: [B, T], the position of each token among its row's tokens that are not padding.
        theta: The base of the frequencies.
        channels: The number of channels to rotate, which is even.
    """
    half = channels // 2
    frequencies = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) * 2 / channels)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = (x[..., part].astype(jnp.float32) for part in (slice(half), slice(half, channels)))
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., channels:]], axis=-1)


def attend(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    start: Array | int,
    precision: Any,
    scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Compute causal attention; scores and softmax are in float32.

    Args:
        q: [B, T, H, D].
        k: [B, L, Hkv, D]; H is a multiple of Hkv.
        v: [B, L, Hkv, V].
        seen: [B, L] bool, True for keys that are not padding. A query always attends to its own place, so that rows
            of padding do not become NaN.
        start: The place of the first query among the keys.
        precision: The precision of the products.
        scale: The factor of the scores; None is D ** -0.5.
        window: The number of places that a query attends to, including its own; None is all before it.

    Returns:
        [B, T, H, V], in v's dtype.
    """
    B, T, H, D = q.shape
    L, Hkv = k.shape[1:3]
    q = q.reshape(B, T, Hkv, H // Hkv, D)
    scale = D**-0.5 if scale is None else scale

    def block(q: Array, places: Array) -> Array:
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32)
        keys = jnp.arange(L)
        visible = (keys <= places[:, None]) & seen[:, None] | (keys == places[:, None])  # [B, T, L]
        if window is not None:
            visible &= keys > places[:, None] - window
        scores = jnp.where(visible[:, None, None], scores * scale, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", shares, v, precision=precision)

    places = start + jnp.arange(T)
    return (block(q, places) if T <= QUERIES else _by_blocks(block, q, places)).reshape(B, T, H, -1)


def _by_blocks(block: Callable[[Array, Array], Array], q: Array, places: Array) -> Array:
    """Apply ``block`` to QUERIES queries at a time; the backward pass computes their scores again."""
    T = q.shape[1]
    count = -(-T // QUERIES)
    more = count * QUERIES - T
    q = jnp.pad(q, ((0, 0), (0, more), *[(0, 0)] * (q.ndim - 2)))
    q = jnp.moveaxis(q.reshape(q.shape[0], count, QUERIES, *q.shape[2:]), 1, 0)
    places = jnp.pad(places, (0, more)).reshape(count, QUERIES)
    again = jax.checkpoint(block)
    o = jax.lax.map(lambda part: again(*part), (q, places))  # [count, B, QUERIES, ...]
    o = jnp.moveaxis(o, 0, 1)
    return o.reshape(o.shape[0], count * QUERIES, *o.shape[3:])[:, :T]


class Attention(nnx.Module):
    """q_proj [E, H D] (or [E, H 2 D] where it is gated), k_proj and v_proj [E, Hkv D], o_proj [H D, E], and where the
    settings ask for them q_norm and k_norm, over a head's D channels or all heads'."""

    def __init__(
        self,
        hidden_size: int,
        settings: AttentionSettings,
        zero_centred: bool,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ) -> None:
        H, Hkv, D = settings.num_heads, settings.num_kv_heads, settings.head_dim
        self.settings, self.precision = settings, numerics.precision
        rows, heads, keys = ("embed", hidden_size), ("heads", H), ("key_heads", Hkv)
        width = H * D * (2 if settings.gated else 1)
        self.q_proj = numerics.linear(hidden_size, width, rngs, (rows, heads), settings.bias)
        self.k_proj = numerics.linear(hidden_size, Hkv * D, rngs, (rows, keys), settings.bias)
        self.v_proj = numerics.linear(hidden_size, Hkv * D, rngs, (rows, keys), settings.bias)
        self.o_proj = numerics.linear(H * D, hidden_size, rngs, (heads, rows))
        if settings.qk_norm is not None:
            whole = settings.qk_norm == "whole"
            self.q_norm = Norm(H * D if whole else D, settings.norm_eps, zero_centred, numerics)
            self.k_norm = Norm(Hkv * D if whole else D, settings.norm_eps, zero_centred, numerics)

    def init_cache(self, batch: int, length: int, dtype: Any) -> KV:
        """Return an empty cache for this layer."""
        shape = (batch, length, self.settings.num_kv_heads, self.settings.head_dim)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def __call__(
        self, x: Array, positions: Array, seen: Array, past: KV | None, start: Array | int
    ) -> tuple[Array, KV | None]:
        """Apply the layer to whole sequences, or to tokens that follow those in the cache.

        Args:
            x: [B, T, E].
            positions: [B, T], the position of each token among its row's tokens that are not padding.
            seen: [B, L] bool, True for places that are not padding, including these tokens; L is T without a cache.
            past: The cache of this layer; None returns none.
            start: The place of the first token in the cache.

        Returns:
            y [B, T, E], and the cache with these tokens added, or None.
        """
        s = self.settings
        B, T, _ = x.shape
        q, gate = self.q_proj(x).reshape(B, T, s.num_heads, -1), None
        if s.gated:
            q, gate = q[..., : s.head_dim], q[..., s.head_dim :]
        k = self.k_proj(x).reshape(B, T, s.num_kv_heads, s.head_dim)
        v = self.v_proj(x).reshape(B, T, s.num_kv_heads, s.head_dim)
        if s.qk_norm is not None:
            q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if s.rotary_dim:
            q = rotated(q, positions, s.rope_theta, s.rotary_dim)
            k = rotated(k, positions, s.rope_theta, s.rotary_dim)
        if past is not None:
            past = past.with_tokens(k, v, start)
            k, v = (kept.astype(k.dtype) for kept in past.of_layer())
        o = attend(q, k, v, seen, start, self.precision, window=s.window)
        if gate is not None:
            o = o * jax.nn.sigmoid(gate)
        return self.o_proj(o.reshape(B, T, -1)), past

    def _normed(self, norm: Norm, x: Array) -> Array:
        """Normalise the heads [B, T, H, D], each by itself or all together."""
        return norm(x) if self.settings.qk_norm == "head" else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
