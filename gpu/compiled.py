"""The bare rule as one operation of torch.compile, forward and backward, since its launches cannot be traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.torch_tensors import register_gradient
from . import interpreter
from .families import Rule
from .operations import Operands
from .rule import apply

__all__ = ["one_operation"]


def one_operation(
    rule: Rule, x: Operands, S: Tensor, bounds: Any, starts: Tensor | None, recurs: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``rule.apply`` while torch.compile traces."""
    return _rule(*x, S, bounds, starts, rule.family, rule.scale, rule.chunk, list(rule[3:]), recurs)


def _now(
    x: Operands, S: Tensor, bounds: Tensor | None, starts: Tensor | None, constants: Any, recurs: bool
) -> tuple[Tensor, Tensor]:
    if S.device.type == "cpu":
        interpreter.start()
    family, scale, chunk, flags = constants
    return apply(Rule(family, scale, chunk, *flags), x, S, bounds, starts, recurs)


@torch.library.custom_op("portable_gdn::fla", mutates_args=())
def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    S: Tensor,
    bounds: Tensor | None,
    starts: Tensor | None,
    family: str,
    scale: float,
    chunk: int,
    flags: list[bool],
    recurs: bool,
) -> tuple[Tensor, Tensor]:
    o, state = _now(Operands(q, k, v, g, b, w), S, bounds, starts, (family, scale, chunk, flags), recurs)
    return o.to(v.dtype).contiguous(), state.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("portable_gdn::fla_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    S: Tensor,
    bounds: Tensor | None,
    starts: Tensor | None,
    family: str,
    scale: float,
    chunk: int,
    flags: list[bool],
    dO: Tensor,
    dS: Tensor,
) -> list[Tensor]:
    """Compute the gradient, and for it the forward pass again: the values that FLA saves do not leave its operation."""
    # Inside an operation torch records nothing for autograd, even with enable_grad.
    records = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), records:
        leaves = [None if a is None else a.detach().requires_grad_() for a in (q, k, v, g, b, w, S)]
        *x, initial = leaves
        assert initial is not None
        o, state = _now(Operands._make(x), initial, bounds, starts, (family, scale, chunk, flags), False)
        there = [a for a in leaves if a is not None]
        o = o.to(v.dtype)
    found = torch.autograd.grad([o, state], there, [dO, dS], allow_unused=True)
    return [
        torch.zeros_like(a, memory_format=torch.contiguous_format) if d is None else d.contiguous()
        for a, d in zip(there, found, strict=True)
    ]


register_gradient(_rule, _backward, constants=4)
