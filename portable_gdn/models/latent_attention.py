"""Latent attention (MLA) without positions: the cache holds one latent vector a token for all heads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from .attention import attend
from .blocks import Norm
from .cache import Latents
from .numerics import Numerics
from .settings import LatentSettings

__all__ = ["LatentAttention"]

Array = Any


class LatentAttention(nnx.Module):
    """Queries [E, H (P + S)] by q_proj, or by q_a_proj, q_norm and q_b_proj; latents and shared keys [E, R + S] by
    kv_a_proj, kv_norm over the R; own keys and values [R, H (P + V)] by kv_b_proj; o_proj [H V, E].

    P and S are the channels of a key that are a head's own and that all share, V those of a value, R those of a latent.
    """

    def __init__(self, hidden_size: int, settings: LatentSettings, numerics: Numerics, rngs: nnx.Rngs) -> None:
        s = settings
        self.settings, self.precision = s, numerics.precision
        queries = s.num_heads * (s.plain_dim + s.shared_dim)
        rows, heads = ("embed", hidden_size), ("heads", s.num_heads)
        if s.query_rank is None:
            self.q_proj = numerics.linear(hidden_size, queries, rngs, (rows, heads))
        else:
            self.q_a_proj = numerics.linear(hidden_size, s.query_rank, rngs, (rows, None))
            self.q_norm = Norm(s.query_rank, s.norm_eps, False, numerics)
            self.q_b_proj = numerics.linear(s.query_rank, queries, rngs, (None, heads))
        self.kv_a_proj = numerics.linear(hidden_size, s.rank + s.shared_dim, rngs, (rows, None))
        self.kv_norm = Norm(s.rank, s.norm_eps, False, numerics)
        width = s.num_heads * (s.plain_dim + s.value_dim)
        self.kv_b_proj = numerics.linear(s.rank, width, rngs, (None, heads))
        self.o_proj = numerics.linear(s.num_heads * s.value_dim, hidden_size, rngs, (heads, rows))

    def init_cache(self, batch: int, length: int, dtype: Any) -> Latents:
        """An empty cache of this layer."""
        return Latents(jnp.zeros((batch, length, self.settings.rank + self.settings.shared_dim), dtype))

    def __call__(
        self, x: Array, positions: Array, seen: Array, past: Latents | None, start: Array | int
    ) -> tuple[Array, Latents | None]:
        """Whole sequences, or what follows those in the cache; arguments and results as those of ``Attention``.
        Positions are not used."""
        s = self.settings
        B, T, _ = x.shape
        q = self.q_proj(x) if s.query_rank is None else self.q_b_proj(self.q_norm(self.q_a_proj(x)))
        q = q.reshape(B, T, s.num_heads, -1)
        both = self.kv_a_proj(x)
        both = jnp.concatenate([self.kv_norm(both[..., : s.rank]), both[..., s.rank :]], axis=-1)
        if past is not None:
            past = past.with_tokens(both, start)
            both = past.of_layer().astype(both.dtype)
        # One token reads the latents as they are; for many it is less work to make all heads' keys and values once.
        o = (self._by_latents if T == 1 else self._by_heads)(q, both, seen, start)
        return self.o_proj(o.reshape(B, T, -1)), past

    @property
    def _scale(self) -> float:
        return (self.settings.plain_dim + self.settings.shared_dim) ** -0.5

    def _by_heads(self, q: Array, both: Array, seen: Array, start: Array | int) -> Array:
        s = self.settings
        B, L, _ = both.shape
        own = self.kv_b_proj(both[..., : s.rank]).reshape(B, L, s.num_heads, -1)
        shared = jnp.broadcast_to(both[:, :, None, s.rank :], (B, L, s.num_heads, s.shared_dim))
        k = jnp.concatenate([own[..., : s.plain_dim], shared], axis=-1)
        return attend(q, k, own[..., s.plain_dim :], seen, start, self.precision, self._scale)

    def _by_latents(self, q: Array, both: Array, seen: Array, start: Array | int) -> Array:
        """As ``_by_heads``, by associativity: queries are taken to the latents, and what these give to the values."""
        s = self.settings
        kernel = self.kv_b_proj.kernel[...].astype(q.dtype).reshape(s.rank, s.num_heads, -1)
        keys, values = kernel[..., : s.plain_dim], kernel[..., s.plain_dim :]
        taken = jnp.einsum("bthp,rhp->bthr", q[..., : s.plain_dim], keys, precision=self.precision)
        taken = jnp.concatenate([taken, q[..., s.plain_dim :]], axis=-1)
        k = both[:, :, None]
        o = attend(taken, k, k[..., : s.rank], seen, start, self.precision, self._scale)
        return jnp.einsum("bthr,rhv->bthv", o, values, precision=self.precision)
