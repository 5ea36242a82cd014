"""Helpers for backends on torch tensors. They import torch when they are called, not with this module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from .operands import DIFFERENTIABLE
from .problem import Problem, Result

__all__ = [
    "boundaries_as_tensor",
    "float32_products",
    "from_numpy",
    "gradients",
    "on_host",
    "register_gradient",
    "set_back",
    "to_numpy",
]

Tensor = Any


def from_numpy(operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy numpy arrays to tensors on the CPU with equal dtypes; bfloat16 is copied bit by bit."""
    import torch

    def convert(a: Any) -> Tensor:
        a = np.array(a, order="C")  # a copy that owns its memory: torch has no read-only tensors
        if a.dtype.name == "bfloat16":
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    return {name: convert(a) for name, a in operands.items()}


def to_numpy(array: Tensor) -> np.ndarray:
    """Return the contents of a tensor as a numpy array."""
    import torch

    array = array.detach().cpu()
    if array.dtype != torch.bfloat16:
        return array.numpy()
    import ml_dtypes

    return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@contextmanager
def float32_products(device_type: str) -> Iterator[None]:
    """Compute products of float32 tensors within the block as IEEE products, whatever the caller has set for a model.

    Neither ``torch.autocast`` nor TF32 or bfloat16 for float32 (``torch.set_float32_matmul_precision``, the backends'
    ``fp32_precision``) rounds operands in the block. While torch.compile traces a program, only autocast is turned off.

    Args:
        device_type: the type of the device on which the block computes. Autocast is left alone for a device that does
            not support it, such as "meta".
    """
    import torch

    compiling = torch.compiler.is_compiling()
    if not compiling:
        _switches.enter()
    try:
        if torch.amp.is_autocast_available(device_type):
            with torch.autocast(device_type, enabled=False):
                yield
        else:
            yield
    finally:
        if not compiling:
            _switches.leave()


class _Switches:
    """torch's process-wide switches for products: the first thread to enter sets them, the last to leave resets them.

    They hold for the whole process, so threads that are inside at once share one change.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before: list[tuple[Any, str]] = []

    def enter(self) -> None:
        import torch

        with self.lock:
            self.inside += 1
            if self.inside > 1:
                return
            matmul = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
            if not all(hasattr(switch, "fp32_precision") for switch in matmul):  # before torch 2.9
                self.before = [(None, torch.get_float32_matmul_precision())]
                torch.set_float32_matmul_precision("highest")
                return
            loose = [(switch, switch.fp32_precision) for switch in matmul]
            self.before = [(switch, value) for switch, value in loose if value not in ("none", "ieee")]
            for switch, _ in self.before:
                switch.fp32_precision = "ieee"

    def leave(self) -> None:
        import torch

        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            for switch, value in self.before:
                if switch is None:
                    torch.set_float32_matmul_precision(value)
                else:
                    set_back(switch, value)
            self.before = []


def set_back(switch: Any, value: str) -> None:
    """Set a switch of torch back to the ``fp32_precision`` read from it, which may be that of a wider switch."""
    switch.fp32_precision = "none"
    if switch.fp32_precision != value:
        switch.fp32_precision = value


_switches = _Switches()


def on_host(x: Any) -> np.ndarray:
    """Copy the contents of a tensor or numpy array to the host."""
    return np.array(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def boundaries_as_tensor(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the operands, with ``cu_seqlens`` moved to their device if the caller passed it as a numpy array."""
    import torch

    bounds = operands.get("cu_seqlens")
    if not isinstance(bounds, np.ndarray):
        return operands
    like = operands["qkv"] if "qkv" in operands else operands["q"]
    return {**operands, "cu_seqlens": torch.as_tensor(bounds, device=like.device)}


def gradients(
    run: Callable[[Problem], Result], problem: Problem, cotangents: Mapping[str, Tensor]
) -> tuple[Result, dict[str, Tensor]]:
    """Compute a call and its gradients with autograd.

    Args:
        run: computes a call.
        problem: the call.
        cotangents: the cotangents of "o" and "state"; a missing one is zeros.

    Returns:
        The result, and the cotangent of each operand that has a gradient.
    """
    import torch

    smooth = {
        name: a.detach().clone().requires_grad_() for name, a in problem.operands.items() if name in DIFFERENTIABLE
    }
    with torch.enable_grad():
        result = run(Problem(problem.signature, {**problem.operands, **smooth}))
        pairs = [
            (value, cotangents[name])
            for name, value in (("o", result.o), ("state", result.state))
            if name in cotangents and value is not None and value.requires_grad
        ]
        found = torch.autograd.grad(
            [value for value, _ in pairs], list(smooth.values()), [d for _, d in pairs], allow_unused=True
        )
    grads = {name: torch.zeros_like(a) if d is None else d for (name, a), d in zip(smooth.items(), found, strict=True)}
    return Result(*(None if a is None else a.detach() for a in result)), grads


def register_gradient(operation: Any, backward: Any, constants: int) -> None:
    """Register an operation of the rule with torch.compile (its output shapes) and with autograd (its gradient).

    Args:
        operation: takes the tensors q, k, v, g, b, w, S, boundaries and starts, then constants; returns o and states.
        backward: takes these tensors and the first of the constants, then the cotangents of o and states; returns the
            cotangents of those tensors from q to S that are not None.
        constants: the number of constants that the backward operation takes.
    """
    import torch

    def empty(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def outputs(q: Any, k: Any, v: Any, g: Any, b: Any, w: Any, S: Any, *rest: Any) -> Any:
        return empty(v), empty(S)

    def cotangents(q: Any, k: Any, v: Any, g: Any, b: Any, w: Any, S: Any, *rest: Any) -> Any:
        return [empty(a) for a in (q, k, v, g, b, w, S) if a is not None]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:9])
        ctx.constants, ctx.others = inputs[9 : 9 + constants], len(inputs) - 7

    def gradient(ctx: Any, dO: Any, dS: Any) -> Any:
        tensors = ctx.saved_tensors
        found = iter(backward(*tensors, *ctx.constants, dO.contiguous(), dS.contiguous()))
        return (*[None if a is None else next(found) for a in tensors[:7]], *[None] * ctx.others)

    operation.register_fake(outputs)
    backward.register_fake(cotangents)
    operation.register_autograd(gradient, setup_context=setup_context)
