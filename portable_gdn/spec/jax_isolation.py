"""Isolation of values that are not finite: they affect their own segment only.

Segments that share a chunk also share products, and 0 * NaN is NaN. Therefore a token with a value that is not finite
(a decay may be -inf) is replaced by one that changes nothing, and everything that it would have reached is set to NaN:
the outputs from that token to the end of its segment, the state if the segment is the row's last, and, in the backward
pass, every gradient of the segment. Nothing is hidden, and other segments keep their results bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["clean", "clean_cotangents", "mark", "mark_gradients"]

Array = Any


def _finite(x: Array) -> Array:
    """Return [B, T], whether all of x [B, T, heads, channels] is finite at each token."""
    return jnp.all(jnp.isfinite(x), axis=(2, 3))


def _segments(starts: Array) -> Array:
    return jnp.cumulative_sum(starts.astype(jnp.int32), axis=1)


def _reached(bad: Array, segment: Array, reverse: bool = False) -> Array:
    """Return the tokens at or after (with ``reverse``, at or before) a bad token of their segment."""
    if reverse:
        latest = lax.cummin(jnp.where(bad, segment, jnp.int32(2**30)), axis=1, reverse=True)
    else:
        latest = lax.cummax(jnp.where(bad, segment, jnp.int32(-1)), axis=1)
    return latest == segment


def clean(x: tuple[Array | None, ...], S: Array, starts: Array) -> tuple[tuple[Array | None, ...], Array, Array]:
    """Replace values that are not finite in the operands (q, k, v, g, b, w) and the states.

    Returns:
        The operands, the states, and the tokens [B, T] that the replaced values would have reached.
    """
    g = x[3]
    bad = jnp.any(jnp.isnan(g) | (g == jnp.inf), axis=(2, 3))
    for a in (*x[:3], *x[4:]):
        if a is not None:
            bad = bad | ~_finite(a)
    bad_state = ~jnp.all(jnp.isfinite(S), axis=(1, 2, 3))
    segment = _segments(starts)
    reached = _reached(bad, segment) | (bad_state[:, None] & (segment == 0))
    x = tuple(None if a is None else jnp.where(bad[:, :, None, None], jnp.zeros((), a.dtype), a) for a in x)
    return x, jnp.where(bad_state[:, None, None, None], 0.0, S), reached


def mark(o: Array, S: Array, reached: Array) -> tuple[Array, Array]:
    """Set outputs and states to NaN where values that were not finite would have reached them."""
    return (
        jnp.where(reached[:, :, None, None], jnp.nan, o),
        jnp.where(reached[:, -1, None, None, None], jnp.nan, S),
    )


def clean_cotangents(dO: Array, dS: Array, starts: Array, reached: Array) -> tuple[Array, Array, Array]:
    """Set the cotangents of affected segments to 0; return them, and the tokens [B, T] of all affected segments."""
    segment = _segments(starts)
    bad_state = ~jnp.all(jnp.isfinite(dS), axis=(1, 2, 3))
    bad = reached | ~_finite(dO) | (bad_state[:, None] & (segment == segment[:, -1:]))
    affected = _reached(bad, segment) | _reached(bad, segment, reverse=True)
    return (
        jnp.where(affected[:, :, None, None], 0.0, dO),
        jnp.where(affected[:, -1, None, None, None], 0.0, dS),
        affected,
    )


def mark_gradients(grads: list[Array | None], dS: Array, affected: Array) -> tuple[list[Array | None], Array]:
    """Set every gradient of an affected segment to NaN."""
    grads = [None if a is None else jnp.where(affected[:, :, None, None], jnp.nan, a) for a in grads]
    return grads, jnp.where(affected[:, 0, None, None, None], jnp.nan, dS)
