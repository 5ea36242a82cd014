"""Index arithmetic on values in registers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["BF16", "F32", "block_of", "divided", "iota", "square_indices", "within"]

Array = Any

F32, BF16 = jnp.float32, jnp.bfloat16


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """The index along ``axis``, int32 of the given shape."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def square_indices(size: int) -> tuple[Array, Array]:
    """Row and column numbers, int32 [size, size] each."""
    return iota((size, size), 0), iota((size, size), 1)


def block_of(index: Array, size: int) -> Array:
    """Number of the block of ``size`` (a power of two) that an index lies in."""
    return index >> (size.bit_length() - 1)


def within(index: Array, size: int) -> Array:
    """Place of an index in its block of ``size`` (a power of two)."""
    return index & (size - 1)


def divided(index: Array, by: int) -> Array:
    """An index that is not negative, divided by any number. (``//`` asks which TPU it is lowered for, which nobody may
    know.)"""
    return lax.div(index, jnp.int32(by))
