"""The key heads of a device's value heads, where the key heads do not split as those do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..spec.jax_tracing import varying_like

__all__ = ["own_heads", "own_key_heads"]

Array = Any


def own_key_heads(H: int, HV: int, parts: int, index: Array) -> tuple[Array, int]:
    """Which key heads the part ``index`` of ``parts`` reads with its HV / parts value heads.

    Returns:
        Their numbers [n], int32, and n: 1 where one serves all of its value heads, else one for each of them.
    """
    own, shared = HV // parts, HV // H
    first = index * own
    if shared % own == 0:
        return jnp.reshape(first // shared, (1,)), 1
    return (first + jnp.arange(own)) // shared, own


def own_heads(a: Array, axis: int, H: int, heads: Array) -> Array:
    """Some of the heads of an array that has H of them along ``axis``, side by side with their channels or alone."""
    shape = a.shape
    apart = jnp.reshape(a, (*shape[:axis], H, shape[axis] // H, *shape[axis + 1 :]))
    apart, heads = varying_like(apart, heads), varying_like(heads, apart)
    if heads.shape[0] == 1:
        taken = lax.dynamic_slice_in_dim(apart, heads[0], 1, axis)
    else:
        taken = jnp.take(apart, heads, axis=axis)
    return jnp.reshape(taken, (*shape[:axis], -1, *shape[axis + 1 :]))
