"""Rows of several segments (``segment_ids``) for kernels that know sequences only: a segment begins with a reset.

A gate of -inf at its first token leaves nothing of the state before, exactly, and stages do not change by a bit
(``spec.stages.decay``). What is not finite stays in its own segment (``spec.jax_isolation``).
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
    """The operands with a reset where a segment begins, and the tokens [B, T] that something not finite reaches.

    Without segments x as it is, and None.
    """
    if x.starts is None:
        return x, None
    S = jnp.zeros((x.g.shape[0], 1, 1, 1), x.g.dtype) if x.S is None else x.S
    (q, k, v, decay, b, w), S, reached = isolation.clean((x.q, x.k, x.v, x.g, x.b, x.w), S, x.starts)
    assert decay is not None
    g = jnp.where(x.starts[:, :, None, None], -jnp.inf, decay)
    return Prepared(q, k, v, g, b, w, None if x.S is None else S, x.starts, x.conv_state), reached


def marked(o: Array, S: Array, reached: Array | None) -> tuple[Array, Array]:
    """Output and final states, NaN where what is not finite would have come."""
    return (o, S) if reached is None else isolation.mark(o, S, reached)


def where_sequences_are(s: Signature, bounds: Array | None, x: Array) -> Array:
    """Zeros behind the last of boundaries that nobody could check: no chunk has been there."""
    if bounds is None:
        return x
    there = jnp.arange(s.T) < jnp.asarray(bounds)[-1]
    return jnp.where(jnp.reshape(there, (s.T, *(1,) * (x.ndim - 2))), x, jnp.zeros((), x.dtype))
