"""Operations for meshes with explicit axes, where jax asks its caller how the result of an operation is sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["Projection", "repeated", "with_whole_channels"]

Array = Any


def _spec(x: Array) -> tuple[Any, ...] | None:
    """Return how each axis is sharded, if the type of the array says so."""
    where = jax.typeof(x).sharding
    if AxisType.Explicit not in where.mesh.axis_types:
        return None
    return (*where.spec, *[None] * (x.ndim - len(where.spec)))


def with_whole_channels(x: Array, axis: int = -1) -> Array:
    """Gather an axis onto every device, so that arrays can be concatenated along it."""
    spec = _spec(x)
    if spec is None or spec[axis] is None:
        return x
    whole = [None if i == axis % x.ndim else entry for i, entry in enumerate(spec)]
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*whole)))


class Projection(nnx.Linear):
    """``nnx.Linear`` that also works on meshes with explicit axes.

    Weights that are split over the axes that split the rows of x (FSDP) are gathered. If x is split by heads, over
    which the product sums, every device receives the sum.
    """

    def __call__(self, x: Array, out_sharding: Any = None) -> Array:
        """Project x [..., in] to [..., out]."""
        spec = _spec(x)
        if spec is None:
            return super().__call__(x, out_sharding)
        mesh = jax.typeof(x).sharding.mesh
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        _, columns = _spec(kernel) or (None, None)
        out = _without(columns, _names(*spec))
        kernel = jax.sharding.reshard(kernel, NamedSharding(mesh, PartitionSpec(spec[-1], out)))
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        where = out_sharding or NamedSharding(mesh, PartitionSpec(*spec[:-1], out))
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        y = self.dot_general(x, kernel, dimensions, precision=self.precision, out_sharding=where)
        if bias is not None:
            y += jax.sharding.reshard(bias, NamedSharding(mesh, PartitionSpec(out)))
        return y


def repeated(x: Array, times: int, axis: int) -> Array:
    """Return ``jnp.repeat(x, times, axis)`` with the sharding of x."""
    spec = _spec(x)
    if spec is None:
        return jnp.repeat(x, times, axis=axis)
    where = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return jnp.repeat(x, times, axis=axis, out_sharding=where)


def _names(*entries: Any) -> tuple[str, ...]:
    """Return the axes of the mesh that entries of a PartitionSpec name."""
    return tuple(n for e in entries if e is not None for n in ((e,) if isinstance(e, str) else e))


def _without(entry: Any, taken: tuple[str, ...]) -> Any:
    """Return an entry of a PartitionSpec without these axes of the mesh."""
    left = tuple(n for n in _names(entry) if n not in taken)
    return left[0] if len(left) == 1 else left or None
