"""Arrays whose types say how they are sharded (meshes with explicit axes), where jax leaves a choice to its caller."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["projected", "with_whole_channels"]

Array = Any


def _spec(x: Array) -> tuple[Any, ...] | None:
    """How each axis is sharded, where the type says it."""
    where = jax.typeof(x).sharding
    if AxisType.Explicit not in where.mesh.axis_types:
        return None
    return (*where.spec, *[None] * (x.ndim - len(where.spec)))


def with_whole_channels(x: Array, axis: int = -1) -> Array:
    """The array with all of an axis on every device, so that it can be joined with others along it."""
    spec = _spec(x)
    if spec is None or spec[axis] is None:
        return x
    whole = [None if i == axis % x.ndim else entry for i, entry in enumerate(spec)]
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*whole)))


def projected(linear: nnx.Linear, x: Array) -> Array:
    """``linear(x)``; where x is split by heads, which the product sums over, every device gets the sum."""
    spec = _spec(x)
    if spec is None or spec[-1] is None:
        return linear(x)
    kernel = _spec(linear.kernel[...])
    out = PartitionSpec(*spec[:-1], None if kernel is None else kernel[-1])
    return linear(x, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, out))
