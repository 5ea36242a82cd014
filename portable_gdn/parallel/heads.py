"""The key heads that a device needs for its value heads, if the key heads cannot be split in the same way."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..spec.jax_tracing import varying_like

__all__ = ["own_heads", "own_key_heads"]

Array = Any


def own_key_heads(H: int, HV: int, parts: int, index: Array) -> tuple[Array, int]:
    """Return the key heads that part ``index`` of ``parts`` reads for its HV / parts value heads.

    Returns:
        Their numbers [n] in int32, and n: 1 if one key head serves all of the value heads, else one per value head.
    """
    own, shared = HV // parts, HV // H
    first = index * own
    if shared % own == 0:
        return jnp.reshape(first // shared, (1,)), 1
    return (first + jnp.arange(own)) // shared, own


def own_heads(a: Array, axis: int, H: int, heads: Array) -> Array:
    """Select heads of an array that has H heads along ``axis``, where each may be followed by its channels."""
    shape = a.shape
    apart = jnp.reshape(a, (*shape[:axis], H, shape[axis] // H, *shape[axis + 1 :]))
    apart, heads = varying_like(apart, heads), varying_like(heads, apart)
    if heads.shape[0] == 1:
        taken = lax.dynamic_slice_in_dim(apart, heads[0], 1, axis)
    else:
        taken = jnp.take(apart, heads, axis=axis)
    return jnp.reshape(taken, (*shape[:axis], -1, *shape[axis + 1 :]))
