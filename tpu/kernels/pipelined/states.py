"""States of heads that are no whole tiles: at the place of their channels in whole tiles, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from .geometry import Pipeline, Span

__all__ = ["fill_state", "head_states", "placed"]

Array = Any
Ref = Any


def placed(a: Array, key: Span, value: Span) -> Array:
    """A state [K, V] among zeros, at the place of its channels in whole tiles."""
    for axis, span in ((1, value), (0, key)):
        zeros = lambda n, a=a, axis=axis: jnp.zeros([n if i == axis else m for i, m in enumerate(a.shape)], a.dtype)  # noqa: E731
        parts = [a]
        if span.low:
            parts.insert(0, zeros(span.low))
        if span.high < span.lanes:
            parts.append(zeros(span.lanes - span.high))
        a = jnp.concatenate(parts, axis) if len(parts) > 1 else a
    return a


def fill_state(p: Pipeline, S: Ref, given: Ref) -> None:
    """All heads' states [heads, key lanes, value lanes] from those given, [1, heads, K, V]."""
    for i, value in enumerate(p.values):
        key = p.keys[i // p.R]
        S[i, : key.lanes, : value.lanes] = placed(given[0, i], key, value)


def head_states(p: Pipeline, S: Ref) -> Iterator[tuple[int, Array]]:
    """All heads' states by number, [K, V] each."""
    for i, value in enumerate(p.values):
        key = p.keys[i // p.R]
        yield i, S[i, key.low : key.high, value.low : value.high]
