"""Helpers for backends on JAX arrays. They import jax when they are called, not with this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .operands import DIFFERENTIABLE
from .problem import Problem, Result

__all__ = ["from_numpy", "gradients"]

Array = Any


def from_numpy(operands: Mapping[str, Any]) -> dict[str, Array]:
    """Convert numpy arrays to JAX arrays that share no memory with them."""
    import jax.numpy as jnp

    return {name: jnp.array(a) for name, a in operands.items()}


def gradients(
    run: Callable[[Problem], Result], problem: Problem, cotangents: Mapping[str, Array]
) -> tuple[Result, dict[str, Array]]:
    """Compute a call and its gradients with ``jax.vjp``.

    Args:
        run: computes a call.
        problem: the call.
        cotangents: the cotangents of "o" and "state"; a missing one is zeros.

    Returns:
        The result, and the cotangent of each operand that has a gradient.
    """
    import jax
    import jax.numpy as jnp

    smooth = {name: a for name, a in problem.operands.items() if name in DIFFERENTIABLE}

    def outputs(smooth: dict[str, Array]) -> tuple[dict[str, Array], Result]:
        result = run(Problem(problem.signature, {**problem.operands, **smooth}))
        return {"o": result.o, "state": result.state}, result

    out, pull, result = jax.vjp(outputs, smooth, has_aux=True)
    full = {name: None if value is None else cotangents.get(name, jnp.zeros_like(value)) for name, value in out.items()}
    return result, pull(full)[0]
