"""Compute rows of several segments (``segment_ids``) with kernels that support only sequences: reset at each segment.

A gate of -inf at a segment's first token erases the state before it exactly, and does not change a bit of any stage
(``spec.stages.decay``). Non-finite values stay in their own segment (``spec.jax_isolation``).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..spec import jax_isolation as isolation
from ..spec.problem import Signature
from ..spec.prologue import Prepared

__all__ = ["marked", "separated", "where_sequences_are"]

Array = Any


def separated(x: Prepared) -> tuple[Prepared, Array | None]:
    """Return the operands with a reset where each segment begins, and the tokens [B, T] that non-finite values reach.

    Without segments, return x and None.
    """
    if x.starts is None:
        return x, None
    S = jnp.zeros((x.g.shape[0], 1, 1, 1), x.g.dtype) if x.S is None else x.S
    (q, k, v, decay, b, w), S, reached = isolation.clean((x.q, x.k, x.v, x.g, x.b, x.w), S, x.starts)
    assert decay is not None
    g = jnp.where(x.starts[:, :, None, None], -jnp.inf, decay)
    return Prepared(q, k, v, g, b, w, None if x.S is None else S, x.starts, x.conv_state), reached


def marked(o: Array, S: Array, reached: Array | None) -> tuple[Array, Array]:
    """Return the output and final states with NaN wherever non-finite values would have propagated."""
    return (o, S) if reached is None else isolation.mark(o, S, reached)


def where_sequences_are(s: Signature, bounds: Array | None, x: Array) -> Array:
    """Set tokens after the last boundary to zero if boundaries were not checked: no chunk computes them."""
    if bounds is None:
        return x
    there = jnp.arange(s.T) < jnp.asarray(bounds)[-1]
    return jnp.where(jnp.reshape(there, (s.T, *(1,) * (x.ndim - 2))), x, jnp.zeros((), x.dtype))
