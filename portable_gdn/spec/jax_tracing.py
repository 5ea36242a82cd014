"""What a trace by JAX brings along: settings that our code must not depend on, and the axes that values vary over."""

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
    """The function, traced under the settings that it is written for, whatever the caller's are.

    Masks here are written without leading axes, which ``jax_numpy_rank_promotion="raise"`` forbids; that setting is for
    the code of whoever chose it. JAX traces the rules of a custom gradient on their own, so they need this, too.
    """

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return inside


def axes_of(*arrays: Array) -> frozenset[str]:
    """The axes of a mesh over which any of these arrays varies, where ``jax.shard_map`` keeps count of that.

    Empty outside of ``shard_map``, and inside one with ``check_vma=False``. Leaves of a tree may be None.
    """
    types = (jax.typeof(a).manual_axis_type for a in jax.tree.leaves(arrays))
    return frozenset().union(*(t.varying for t in types))


def _cast(x: Array, axes: frozenset[str]) -> Array:
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def varying(operands: Mapping[str, Array]) -> dict[str, Array]:
    """Operands of a call, each varying over every axis over which any of them does.

    ``shard_map`` demands this of what a loop carries and of the branches of a choice. Done before the rule, it leaves
    to JAX what follows for gradients: those of an operand that all devices share are summed over them.
    """
    axes = axes_of(*operands.values())
    return {name: _cast(a, axes) for name, a in operands.items()}


def varying_like(tree: Any, *like: Array) -> Any:
    """Arrays made inside (zeros, say), varying over the axes over which ``like`` does; None stays None."""
    axes = axes_of(*like)
    return jax.tree.map(lambda a: _cast(a, axes), tree) if axes else tree
