"""What one chunk of the backward kernel for long rows reads and writes in VMEM."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..common.norm import norm_gradients
from ..common.registers import BF16, F32, iota
from ..common.summands import Parts
from ..common.tiles import CHUNK, LANES
from .backward_plan import Reverse
from .backward_refs import Refs

__all__ = ["BackwardMemory"]

Array = Any
Ref = Any


class BackwardMemory:
    """Chunk ``n`` of a grid step, whose first token is the row's token ``first``; row: row numbers [C, C]."""

    def __init__(self, p: Reverse, refs: Refs, n: int, first: Array, row: Array) -> None:
        self.p, self.refs, self.n, self.first, self.row = p, refs, n, first, row
        self._here = slice(n * CHUNK, (n + 1) * CHUNK)

    def tokens(self, ref: Ref, h: int) -> Array:
        """A head of q, k or dO [C, 128] bfloat16, tokens beyond T 0."""
        a = ref[0, self._here, h * LANES : (h + 1) * LANES]
        if self.p.tail:
            a = jnp.where(self.row + self.first < self.p.T, a.astype(F32), 0.0)
        return a.astype(BF16)

    def output_cotangent(self, i: int) -> Array:
        """The cotangent of a value head's output [C, 128] bfloat16, behind the norm's if there is one."""
        p, x = self.p, self.refs.x
        if p.norm is None or x.norm is None:
            return self.tokens(x.dO, i)
        o, dy = (self._wide(ref, i) for ref in (x.norm.o, x.dO))
        z = None if x.norm.z is None else self._wide(x.norm.z, i)
        d = norm_gradients(p.norm, o, x.norm.weight[...], z, dy)
        if self.refs.out.dz is not None and d.z is not None:
            self.put(self.refs.out.dz, i, d.z.astype(self.refs.out.dz.dtype))
        assert self.refs.out.norm_sums is not None
        self.refs.out.norm_sums[0] += jnp.sum(jnp.reshape(d.weight, (-1, 8, LANES)), 0)
        return d.o.astype(BF16)

    def _wide(self, ref: Ref, i: int) -> Array:
        """A value head [C, 128] float32, tokens beyond T 0."""
        a = ref[0, self._here, i * LANES : (i + 1) * LANES].astype(F32)
        return jnp.where(self.row + self.first < self.p.T, a, 0.0) if self.p.tail else a

    def gates(self) -> tuple[Array, Array]:
        """g and b [heads, C], tokens beyond T 0."""
        g, b = self.refs.x.g[0, 0, :, self._here], self.refs.x.b[0, 0, :, self._here]
        if self.p.tail:
            real = iota(g.shape, 1) + self.first < self.p.T
            g, b = jnp.where(real, g, 0.0), jnp.where(real, b, 0.0)
        return g, b

    def state(self, i: int) -> Array:
        """The state that the chunk starts from, of a value head [128, 128] float32."""
        return self.refs.x.S[0, self.n, i]

    def solved(self, ref: Ref, i: int) -> Parts:
        """M or u of a value head, summands [C, 128]."""
        return tuple(ref[0, self.n, i, n] for n in range(self.p.summands))

    def put(self, ref: Ref, h: int, a: Array) -> None:
        """A head's cotangent [C, 128] of tokens."""
        ref[0, self._here, h * LANES : (h + 1) * LANES] = a

    def put_gate(self, ref: Ref, a: Array) -> None:
        """A gate's cotangent, [heads, C]."""
        ref[0, 0, :, self._here] = a
