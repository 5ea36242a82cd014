"""What a layer takes: its input checked, and its own before JAX reads it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..spec.errors import bad

__all__ = ["as_input"]

Array = Any


def as_input(x: Array, lead: str, width: int, instead: str) -> Array:
    """x as an array of shape [lead, E]; a numpy array is copied, since JAX reads it after the call has returned.

    Args:
        x: what the caller gave.
        lead: names of the axes before E, "B, T" say.
        width: E.
        instead: what to call for arrays of another shape, a part of a sentence.

    Raises:
        GdnError: x is no array, or has another shape.
    """
    shape = getattr(x, "shape", None)
    if shape is None:
        raise bad("x", f"of type {type(x).__name__}", f"be an array [{lead}, E]")
    if len(shape) != lead.count(",") + 2 or shape[-1] != width:
        given = ", ".join(map(str, shape))
        raise bad("x", f"of shape [{given}]", f"have shape [{lead}, E] with E = {width}; {instead}")
    return jnp.array(x) if isinstance(x, np.ndarray) else x
