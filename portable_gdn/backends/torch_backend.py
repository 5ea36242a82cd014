"""``torch``: the rule for torch tensors on any device. Importing this module does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec.evaluate import DIFFERENTIABLE
from ..spec.precision import Rounding
from ..spec.problem import Problem, Result, Signature

__all__ = ["BACKEND", "Torch"]

CHUNK = 64


class Torch:
    """The backend object; see ``spec.problem.Backend``."""

    name = "torch"
    libraries = ("torch",)
    auto = True
    priority = 40
    slow = False

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed; `pip install 'portable-gdn[torch]'` brings it."
        return None

    def refuses(self, signature: Signature) -> str | None:
        """It computes every call on torch tensors."""
        return None

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable once by autograd, and one operation under torch.compile."""
        from .torch_chunks import run

        return run(problem, problem.signature.chunk_size or CHUNK)

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """The result and the operands' cotangents, by autograd."""
        import torch

        smooth = {
            name: a.detach().clone().requires_grad_() for name, a in problem.operands.items() if name in DIFFERENTIABLE
        }
        with torch.enable_grad():
            result = self.run(Problem(problem.signature, {**problem.operands, **smooth}))
            pairs = [
                (value, cotangents[name])
                for name, value in (("o", result.o), ("state", result.state))
                if name in cotangents and value is not None
            ]
            found = torch.autograd.grad(
                [value for value, _ in pairs], list(smooth.values()), [d for _, d in pairs], allow_unused=True
            )
        grads = {
            name: torch.zeros_like(a) if d is None else d for (name, a), d in zip(smooth.items(), found, strict=True)
        }
        return Result(*(None if a is None else a.detach() for a in result)), grads

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """numpy arrays as torch tensors; bfloat16 travels by its bits."""
        import torch

        def convert(a: Any) -> Any:
            a = np.array(a, order="C")  # a copy that owns its memory: torch has no read-only tensors
            return (
                torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
                if a.dtype.name == "bfloat16"
                else torch.from_numpy(a)
            )

        return {name: convert(a) for name, a in operands.items()}

    def to_numpy(self, array: Any) -> np.ndarray:
        """A torch tensor as numpy."""
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            import ml_dtypes

            return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()

    def rounding(self, signature: Signature) -> Rounding:
        """Products are float32, whatever the precision allows (on a GPU with allow_tf32 left off)."""
        return Rounding(chunk_size=signature.chunk_size or CHUNK)


BACKEND = Torch()
