"""``fla``: flash-linear-attention's Triton kernels on a GPU; ``fla-interpret``: the same kernels interpreted on a CPU.

Importing this module imports neither torch nor triton nor FLA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from ..spec import torch_tensors
from ..spec.precision import HIGHEST, OPERANDS, Rounding
from ..spec.problem import Problem, Result, Signature
from ..spec.variants import VARIANTS
from . import interpreter

__all__ = ["FLA", "FLA_INTERPRET", "Fla", "FlaInterpret"]

CHUNK = 64
VARIANTS_HERE = ("DeltaNet", "GDN", "KDA")
LARGEST_K = 256

#: (FLA's version, case of the proof): what its kernels do there by themselves, seen interpreted.
KNOWN = {
    ("0.6.0", "one key, beta 1.998, bfloat16"): (
        "flash-linear-attention 0.6.0 loses the gradient of the initial state (error 0.18) where one key is repeated "
        "with beta near 2 in bfloat16: inverse, states and written values are rounded to bfloat16 on the way"
    ),
}


def _missing() -> str | None:
    """The first package that is not installed, as a sentence."""
    for module, name in (("torch", "torch"), ("triton", "triton"), ("fla", "flash-linear-attention")):
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed; `pip install 'portable-gdn[gpu]'` brings it."
    return None


class Fla:
    """The backend object; see ``spec.problem.Backend``."""

    name = "fla"
    libraries = ("torch",)
    auto = True
    priority = 10
    slow = False
    devices: tuple[str, ...] = ("cuda", "xpu")

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        missing = _missing()
        if missing is not None:
            return missing
        if interpreter.chosen():
            return f"{interpreter.VARIABLE} is set, so Triton's kernels are interpreted in this process."
        import torch

        if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
            return None
        return "there is no GPU that torch can use; fla-interpret runs the same kernels on a CPU."

    def refuses(self, s: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        if s.device not in self.devices:
            return f"these tensors are on {s.device}, and it computes on {' and '.join(self.devices)}"
        if s.variant not in [VARIANTS[name] for name in VARIANTS_HERE]:
            return f"it has {', '.join(VARIANTS_HERE)}, and this is {s.variant.name}"
        if s.K > LARGEST_K:
            return f"FLA's kernels take key dims up to {LARGEST_K}, and K is {s.K}"
        allowed = (32, 64) if s.variant == VARIANTS["KDA"] else (16, 32, 64)
        if s.chunk_size is not None and s.chunk_size not in allowed:
            return f"FLA's kernels take chunks of {', '.join(map(str, allowed))}, and chunk_size is {s.chunk_size}"
        return None

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by autograd, through FLA's own backward kernels."""
        from .adapter import run

        return run(problem)

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """The result and the operands' cotangents, by autograd."""
        return torch_tensors.gradients(self.run, problem, cotangents)

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """numpy arrays as torch tensors on this backend's device."""
        tensors = torch_tensors.from_numpy(operands)
        device = self._device()
        return {name: a if name == "cu_seqlens" else a.to(device) for name, a in tensors.items()}

    def _device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "xpu"

    def to_numpy(self, array: Any) -> Any:
        """The contents of a tensor."""
        return torch_tensors.to_numpy(array)

    def rounding(self, s: Signature) -> Rounding:
        """FLA stores states, inverse and what it writes in the inputs' dtype, and casts scores to it before products.

        float32 inputs enter products as TF32 on a GPU.
        """
        from .adapter import operand_dtype

        dtype = operand_dtype(s)
        kept = self.float32_products if dtype == "float32" else dtype
        return Rounding(HIGHEST if kept == "float32" else dict.fromkeys(OPERANDS, kept), s.chunk_size or CHUNK)

    float32_products = "tf32"

    def known(self, case: str) -> str | None:
        """What FLA's own kernels are known to get wrong in a case of the proof, with the version that was seen to."""
        from importlib import metadata

        return KNOWN.get((metadata.version("flash-linear-attention"), case))


class FlaInterpret(Fla):
    """The same kernels by Triton's interpreter, on CPU tensors: for proof, not for speed."""

    name = "fla-interpret"
    auto = False
    priority = 90
    slow = True
    own_process = True  # the interpreter must be chosen before triton is imported
    devices = ("cpu",)
    float32_products = "float32"
    quick_cases = (
        "one token", "no tokens", "a chunk and a token", "DeltaNet", "bfloat16, 64 x 96", "gates one -inf",
        "packed with empties", "left padding", "step", "kimi_linear layer, continued", "qwen3_next layer",
        "softplus gate, KDA",
    )  # fmt: skip

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None. (That this process cannot is no reason: a fresh one can.)"""
        return _missing()

    def refuses(self, s: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        return interpreter.possible() or super().refuses(s)

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by autograd, through FLA's own backward kernels."""
        interpreter.start()
        return super().run(problem)

    def _device(self) -> str:
        return "cpu"


FLA = Fla()
FLA_INTERPRET = FlaInterpret()
