"""The states that enter the pieces of a sequence, from the pieces' maps, inside ``shard_map``; in float32.

Two ways, whose results are equal up to rounding. ``transposed``: each device gets the maps of all D pieces for its part
of the heads, goes through them in order, and sends the states home; what it sends does not grow with D. Where the
heads do not divide by D, ``doubled`` (Hillis and Steele): log2 D rounds, in each of which a device joins its map with
that of the device 1, 2, 4, ... places before it.
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
    """The product of matrices in float32: the maps of many pieces are multiplied, and so are their errors."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def entering_states(t: Transition, first: Array, axes: Axes) -> Array:
    """The state that enters this device's piece.

    Args:
        t: this device's map: A [N, HV, K, K], B [N, HV, K, V].
        first: the state that enters the first piece [N, HV, K, V], the same on every device.
        axes: the axes of the mesh that split the tokens, the outermost first.
    """
    D = lax.axis_size(axes)
    way = transposed if math.prod(t.A.shape[:2]) % D == 0 else doubled
    return way(t, first, axes)


def transposed(t: Transition, first: Array, axes: Axes) -> Array:
    """By two exchanges of all with all; N * HV must be a multiple of the number of devices."""
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
    """By log2 D + 1 exchanges with a device further and further before this one."""
    D, index, reach = lax.axis_size(axes), lax.axis_index(axes), 1
    while reach < D:
        before = Transition(*lax.ppermute(tuple(t), axes, [(j, j + reach) for j in range(D - reach)]))
        more = joined(product, t, before)
        t = Transition(*(jnp.where(index >= reach, a, b) for a, b in zip(more, t, strict=True)))
        reach *= 2
    before = Transition(*lax.ppermute(tuple(t), axes, [(j, j + 1) for j in range(D - 1)]))
    return jnp.where(index == 0, first, moved(product, before, first))
