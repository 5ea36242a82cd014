"""What a kernel returns, as ``pallas_call`` wants it described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

__all__ = ["result_shapes"]

Array = Any


def result_shapes(shapes: Sequence[Any], like: Array) -> list[Any]:
    """Shapes and dtypes of a kernel's results, varying over the axes of a mesh over which ``like`` does.

    Args:
        shapes: ``jax.ShapeDtypeStruct``, or ``pltpu.HBM`` for results that are not to lie in VMEM.
        like: an operand. Inside ``jax.shard_map`` all operands of a call vary over the same axes (``jax_tracing``).
    """
    axes = jax.typeof(like).manual_axis_type

    def described(shape: Any) -> Any:
        if isinstance(shape, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=axes)
        return replace(shape, inner_aval=shape.inner_aval.update(manual_axis_type=axes))

    return [described(shape) for shape in shapes]
