"""Check a layer's input, and copy numpy arrays before JAX reads them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..spec.errors import bad

__all__ = ["as_input"]

Array = Any


def as_input(x: Array, lead: str, width: int, instead: str) -> Array:
    """Return x as an array of shape [lead, E]; numpy arrays are copied, because JAX reads them after the call returned.

    Args:
        x: The caller's argument.
        lead: The names of the axes before E, for example "B, T".
        width: E.
        instead: A part of a sentence that says what to call with arrays of another shape.

    Raises:
        GdnError: x is not an array, or has another shape.
    """
    shape = getattr(x, "shape", None)
    if shape is None:
        raise bad("x", f"of type {type(x).__name__}", f"be an array [{lead}, E]")
    if len(shape) != lead.count(",") + 2 or shape[-1] != width:
        given = ", ".join(map(str, shape))
        raise bad("x", f"of shape [{given}]", f"have shape [{lead}, E] with E = {width}; {instead}")
    return jnp.array(x) if isinstance(x, np.ndarray) else x
