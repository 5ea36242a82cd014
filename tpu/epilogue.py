"""The backward pass of the output norm and gate: by a kernel if it supports the call, else derived by XLA from the
specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..spec.problem import Signature
from ..spec.prologue import finish
from .chips import Chip
from .kernels.common.gradients import NormOperands
from .kernels.epilogue.gradients import epilogue_gradients
from .kernels.epilogue.plan import epilogue_plan
from .segments import where_sequences_are

__all__ = ["as_given", "norm_operands", "through_norm"]

Array = Any
Operands = dict[str, Array]


def through_norm(
    s: Signature, chip: Chip, interpret: Any, operands: Operands, o: Array, dy: Array
) -> tuple[Array, Operands]:
    """Return the cotangent of the rule's output [B, T, HV, V], and those of the norm's operands.

    Args:
        s: The signature of the call.
        chip: The chip for which the kernel is planned.
        interpret: As in ``Execution``.
        operands: The operands of the call.
        o: The input of the norm, in any shape that begins with [B, T].
        dy: The cotangent of the normalised output [B, T, HV, V].
    """
    plan = epilogue_plan(s, chip)
    if plan is None:
        return _by_specification(s, operands, jnp.reshape(o, dy.shape), dy)
    given = norm_operands(s, operands, o)
    end = jnp.clip(jnp.asarray(operands["cu_seqlens"])[-1:], 0, s.T) if s.packed else jnp.full(1, s.T)
    dtype = jnp.float32 if s.precision == "highest" else jnp.bfloat16  # as the products would round it
    dO, *found = epilogue_gradients(
        plan, given, jnp.reshape(dy, given.o.shape), end.astype(jnp.int32), dtype=dtype, interpret=interpret
    )
    return jnp.reshape(dO, dy.shape), as_given(operands, *found)


def norm_operands(s: Signature, operands: Operands, o: Array) -> NormOperands:
    """Return the operands of an output norm in the form that kernels take.

    Args:
        s: The signature of the call.
        operands: The operands of the call.
        o: The rule's output, in any shape that begins with [B, T].
    """
    weight = operands.get("norm_weight", jnp.ones(s.V)).astype(jnp.float32)
    z = jnp.reshape(operands["z"], (s.B, s.T, -1)) if s.has("z") else None
    z = z.astype(jnp.float32) if z is not None and z.dtype in (jnp.float16, jnp.float64) else z
    return NormOperands(jnp.reshape(o, (s.B, s.T, -1)), z, weight)


def as_given(operands: Operands, dz: Array | None, d_weight: Array | None) -> Operands:
    """Return the cotangents of a norm's operands in the shapes and dtypes of the operands."""
    found = {"z": dz, "norm_weight": d_weight}
    return {
        name: jnp.reshape(a, operands[name].shape).astype(operands[name].dtype)
        for name, a in found.items()
        if name in operands and a is not None
    }


def _by_specification(s: Signature, operands: Operands, o: Array, dy: Array) -> tuple[Array, Operands]:
    some = {name: operands[name] for name in ("z", "norm_weight") if name in operands}
    there = lambda a: where_sequences_are(s, operands.get("cu_seqlens"), a)  # noqa: E731

    def normed(o: Array, some: Operands) -> Array:
        return finish(jnp, s, {**operands, **some}, o)

    return jax.vjp(normed, there(o.astype(jnp.float32)), some)[1](there(dy))
