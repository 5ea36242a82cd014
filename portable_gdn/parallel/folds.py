"""Compute the states that enter the pieces of a sequence from the pieces' maps, inside ``shard_map`` and in float32.

There are two algorithms, whose results are equal up to rounding. In ``transposed``, each device receives the maps of
all D pieces for its share of the heads, applies them in order, and sends the states back; the amount that it sends does
not grow with D. If the number of heads is not divisible by D, ``doubled`` is used, the parallel prefix of Hillis and
Steele: in log2 D rounds, each device combines its map with that of the device 1, 2, 4, ... places before it.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..spec.jax_tracing import varying_like
from ..spec.transition import Transition, joined, moved

__all__ = ["doubled", "entering_states", "product", "transposed"]

Array = Any
Axes = tuple[str, ...]


def product(a: Array, b: Array) -> Array:
    """Multiply matrices in full float32, because the products of many pieces' maps accumulate their errors."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def entering_states(t: Transition, first: Array, axes: Axes) -> Array:
    """Return the state [N, HV, K, V] that enters this device's piece.

    Args:
        t: This device's map: A [N, HV, K, K], B [N, HV, K, V].
        first: The state that enters the first piece [N, HV, K, V], the same on every device.
        axes: The axes of the mesh that split the tokens, the outermost first.
    """
    D = lax.axis_size(axes)
    way = transposed if math.prod(t.A.shape[:2]) % D == 0 else doubled
    return way(t, first, axes)


def transposed(t: Transition, first: Array, axes: Axes) -> Array:
    """Fold by two all-to-all exchanges; N * HV must be divisible by the number of devices."""
    D, K, shape = lax.axis_size(axes), t.A.shape[-1], first.shape
    own = math.prod(shape[:2]) // D
    both = jnp.reshape(jnp.concatenate(t, -1), (D, own, K, -1))
    pieces = lax.all_to_all(both, axes, 0, 0)  # [D pieces, own heads, K, K + V]
    index = lax.axis_index(axes) * own
    state = lax.dynamic_slice_in_dim(jnp.reshape(varying_like(first, pieces), (-1, *shape[2:])), index, own, 0)

    def after(state: Array, piece: Array) -> tuple[Array, Array]:
        return moved(product, Transition(piece[..., :K], piece[..., K:]), state), state

    _, entered = lax.scan(after, state, pieces)
    home = lax.all_to_all(entered, axes, 0, 0)  # [D parts of the heads, own heads, K, V]
    return jnp.reshape(home, shape)


def doubled(t: Transition, first: Array, axes: Axes) -> Array:
    """Fold by log2 D + 1 exchanges, each with a device twice as far away as the one before."""
    D, index, reach = lax.axis_size(axes), lax.axis_index(axes), 1
    while reach < D:
        before = Transition(*lax.ppermute(tuple(t), axes, [(j, j + reach) for j in range(D - reach)]))
        more = joined(product, t, before)
        t = Transition(*(jnp.where(index >= reach, a, b) for a, b in zip(more, t, strict=True)))
        reach *= 2
    before = Transition(*lax.ppermute(tuple(t), axes, [(j, j + 1) for j in range(D - 1)]))
    return jnp.where(index == 0, first, moved(product, before, first))
