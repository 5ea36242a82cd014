"""Checks of array contents, for calls with ``check_values``: at once, or with checkify under a JAX trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .spec.errors import GdnError, bad
from .spec.operands import DIFFERENTIABLE, ON_HOST, PER_TOKEN, WRITE_GATES
from .spec.problem import Signature
from .spec.slots import PENDING, batch_conditions, rows_of, token_rows

__all__ = ["check"]

Array = Any

#: Operands that must be finite; a log decay may be -inf, and is checked separately.
FINITE = tuple(name for name in DIFFERENTIABLE if name != "g")


def check(s: Signature, operands: dict[str, Array]) -> None:
    """Check the contents of a call's arrays; masked tokens may contain anything.

    Under a JAX trace the conditions become ``checkify.check`` calls instead, and under torch.compile they become
    assertions of the compiled program.

    Raises:
        GdnError: A condition fails; the message is that of the first one.
    """
    xp, decide = _tools(s, operands)
    for holds, sentence in _conditions(xp, s, operands):
        decide(holds, sentence)


def _tools(s: Signature, operands: dict[str, Array]) -> tuple[Any, Any]:
    def now(holds: Array, sentence: str) -> None:
        if not bool(holds):
            raise GdnError(sentence)

    if s.library == "torch":
        import array_api_compat.torch as xp
        import torch

        if s.device == "meta":
            raise bad("check_values", "True", "be False for tensors on the meta device, which hold no values")
        if torch.compiler.is_compiling():
            return xp, torch._assert_async
        return xp, now
    if s.traced:
        import jax.numpy as jnp
        from jax.experimental import checkify

        return jnp, lambda holds, sentence: checkify.check(holds, sentence)
    import array_api_compat.numpy as npx

    return npx, now


def _as_held(xp: Any, s: Signature, a: Array, like: Array) -> Array:
    """Return an array of a batch where the checks run: on the operands' device for torch, else in host memory."""
    if s.library == "torch":
        return xp.asarray(a, device=like.device)
    return a if s.traced else np.asarray(a)


def _conditions(xp: Any, s: Signature, operands: dict[str, Array]) -> Iterator[tuple[Array, str]]:
    mask = operands.get("mask")
    if s.update is not None:
        like = next(operands[name] for name in PER_TOKEN if name in operands)
        held = {name: _as_held(xp, s, a, like) for name, a in operands.items() if name in ON_HOST or name == PENDING}
        yield from batch_conditions(xp, s, held)
        mask = token_rows(xp, s, rows_of(xp, s, held), like)[1]
    if mask is not None and not s.traced and s.library != "torch":
        mask = np.asarray(mask)

    def seen(name: str) -> Array:
        x = operands[name]
        if (
            not s.traced and s.library != "torch"
        ):  # JAX arrays too, since each eager operation would be compiled separately
            x = np.asarray(x)
            x = x.astype(np.float32) if x.dtype.name == "bfloat16" else x
        if mask is None or name not in PER_TOKEN:
            return x
        keep = xp.reshape(mask, (*mask.shape, *(1,) * (x.ndim - mask.ndim)))
        return xp.where(keep, x, xp.zeros_like(x))

    for name in FINITE:
        if name in operands:
            yield xp.all(xp.isfinite(seen(name))), f"{name} holds values that are not finite; all must be finite."
    if "g" in operands:
        g = seen("g")
        if s.gate is not None:
            yield xp.all(xp.isfinite(g)), "g holds values that are not finite; a raw projection must be finite."
        else:
            yield xp.all(xp.logical_not(xp.isnan(g))), "g holds NaN; it must be a log decay, <= 0 (-inf is a reset)."
            yield xp.all(g <= 0), "g holds positive values; it must be a log decay, <= 0."
    for name in WRITE_GATES:
        if name in operands:
            x = seen(name)
            yield xp.all((x >= 0) & (x <= 2)), f"{name} holds values outside [0, 2]; it must lie within."
    if "cu_seqlens" in operands:
        cu = operands["cu_seqlens"] if s.traced or s.library == "torch" else np.asarray(operands["cu_seqlens"])
        yield cu[0] == 0, "cu_seqlens does not start at 0; it must."
        yield cu[-1] == s.T, f"cu_seqlens does not end at T = {s.T}; it must."
        yield (cu[1:] >= cu[:-1]).all(), "cu_seqlens decreases; it must never."
