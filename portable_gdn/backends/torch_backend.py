"""``torch``: the rule for torch tensors on any device. Importing this module does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec import torch_tensors
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
        return torch_tensors.gradients(self.run, problem, cotangents)

    #: Stages that the loop never forms: ``probe`` derives them with its own solver.
    derived_stages = ("wy",)

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """The loop's stages of every chunk; see ``spec.probe``."""
        from .torch_chunks import probe

        return probe(problem, problem.signature.chunk_size or CHUNK)

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """numpy arrays as torch tensors; bfloat16 travels by its bits."""
        return torch_tensors.from_numpy(operands)

    def to_numpy(self, array: Any) -> np.ndarray:
        """A torch tensor as numpy."""
        return torch_tensors.to_numpy(array)

    def rounding(self, signature: Signature) -> Rounding:
        """Products are float32, whatever the precision allows (on a GPU with allow_tf32 left off)."""
        return Rounding(chunk_size=signature.chunk_size or CHUNK)


BACKEND = Torch()
