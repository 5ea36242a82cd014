"""``torch``: the rule for torch tensors on any device. Importing this module does not import torch."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..spec.backend import Backend
from ..spec.precision import Rounding
from ..spec.problem import Problem, Result, Signature

__all__ = ["BACKEND", "Torch"]

CHUNK = 64


class Torch(Backend):
    """The backend that computes torch tensors with a loop over chunks, on any device."""

    name = "torch"
    libraries = ("torch",)
    auto = True
    priority = 40

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed; `pip install 'portable-gdn[torch]'` brings it."
        return None

    def run(self, problem: Problem) -> Result:
        """Compute a call. Autograd can differentiate the result, and torch.compile sees one operation."""
        from .torch_chunks import run

        return run(problem, problem.signature.chunk_size or CHUNK)

    #: Stages that the loop never computes; ``probe`` derives them with the loop's own solver.
    derived_stages = ("wy",)

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """Return the loop's stages of every chunk; see ``spec.probe``."""
        from .torch_chunks import probe

        return probe(problem, problem.signature.chunk_size or CHUNK)

    def rounding(self, signature: Signature) -> Rounding:
        """Return the rounding: products are float32, whatever the precision allows and torch's own settings are."""
        return Rounding(chunk_size=signature.chunk_size or CHUNK)


BACKEND = Torch()
