"""What lies behind the rule, for the backward pass: the cotangents of the output's norm and gate, by a kernel where it
can, else as XLA derives them from the specification."""

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
    """The cotangent of the rule's output [B, T, HV, V], and those of the norm's operands.

    Args:
        s: the call.
        chip: the one that the kernel's plan is for.
        interpret: as of ``Execution``.
        operands: of the call.
        o: what the norm read, in any shape that begins with [B, T].
        dy: the cotangent of the normed output [B, T, HV, V].
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
    """What an output norm read, as kernels take it.

    Args:
        s: the call.
        operands: of the call.
        o: the rule's output, in any shape that begins with [B, T].
    """
    weight = operands.get("norm_weight", jnp.ones(s.V)).astype(jnp.float32)
    z = jnp.reshape(operands["z"], (s.B, s.T, -1)) if s.has("z") else None
    z = z.astype(jnp.float32) if z is not None and z.dtype in (jnp.float16, jnp.float64) else z
    return NormOperands(jnp.reshape(o, (s.B, s.T, -1)), z, weight)


def as_given(operands: Operands, dz: Array | None, d_weight: Array | None) -> Operands:
    """The cotangents of a norm's operands in the shapes and dtypes of those that are given."""
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
