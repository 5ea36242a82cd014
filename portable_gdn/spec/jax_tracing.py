"""Helpers for code that JAX traces: settings it must not depend on, and the mesh axes over which values vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax import lax

__all__ = ["axes_of", "own_settings", "varying", "varying_like"]

Array = Any
P = ParamSpec("P")
R = TypeVar("R")


def own_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it is traced under the settings it is written for, whatever the caller has set.

    Masks in this package have no leading axes, which ``jax_numpy_rank_promotion="raise"`` forbids; that setting is
    meant for the caller's own code. JAX traces the rules of a custom gradient separately, so they need this wrapper,
    too.
    """

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return inside


def axes_of(*arrays: Array) -> frozenset[str]:
    """Return the mesh axes over which any of these arrays varies, as ``jax.shard_map`` tracks them.

    The set is empty outside ``shard_map``, and inside one with ``check_vma=False``. Leaves of a tree may be None.
    """
    types = (jax.typeof(a).manual_axis_type for a in jax.tree.leaves(arrays))
    return frozenset().union(*(t.varying for t in types))


def _cast(x: Array, axes: frozenset[str]) -> Array:
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def varying(operands: Mapping[str, Array]) -> dict[str, Array]:
    """Return the operands of a call, each marked as varying over every axis over which any of them varies.

    ``shard_map`` requires this of the values that a loop carries and of the branches of a conditional. As it happens
    before the rule, JAX derives the gradients correctly: those of an operand that all devices share are summed over the
    devices.
    """
    axes = axes_of(*operands.values())
    return {name: _cast(a, axes) for name, a in operands.items()}


def varying_like(tree: Any, *like: Array) -> Any:
    """Mark arrays made inside, such as zeros, as varying over the axes over which ``like`` varies; None stays None."""
    axes = axes_of(*like)
    return jax.tree.map(lambda a: _cast(a, axes), tree) if axes else tree
