"""The rows of a block of tokens that are a chunk's own: heads read from them, and written to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..plan import Plan

__all__ = ["Rows"]

Array = Any


class Rows(NamedTuple):
    """Rows ``begin`` to ``end`` of a block of C; the others belong to another chunk or to nobody."""

    p: Plan
    begin: Array
    end: Array

    def own(self, width: int) -> Array:
        """Which they are, [C, width]."""
        row = lax.broadcasted_iota(jnp.int32, (self.p.C, width), 0)
        return (row >= self.begin) & (row < self.end)

    def heads(self, ref: Any, number: int, width: int, of: int) -> Array:
        """Heads of a block [1, C, number * width] as float32 [P, number / P, C, width], other rows 0."""
        keep = self.own(width)
        parts = [ref[0, :, i * width : (i + 1) * width].astype(jnp.float32) for i in range(number)]
        return jnp.reshape(jnp.stack([jnp.where(keep, a, 0.0) for a in parts]), (self.p.P, of, self.p.C, width))

    def by_head(self, a: Array, width: int) -> Array:
        """Value heads of [C, heads * width] as [P, R, C, width]."""
        parts = [a[:, i * width : (i + 1) * width] for i in range(self.p.heads)]
        return jnp.reshape(jnp.stack(parts), (self.p.P, self.p.R, self.p.C, width))

    def put(self, ref: Any, a: Array, width: int) -> None:
        """Heads [.., C, width] into a block [1, C, heads * width], which keeps its other rows."""
        keep, a = self.own(width), jnp.reshape(a, (-1, self.p.C, width))
        for i in range(a.shape[0]):
            lanes = slice(i * width, (i + 1) * width)
            ref[0, :, lanes] = jnp.where(keep, a[i], ref[0, :, lanes].astype(jnp.float32)).astype(ref.dtype)
