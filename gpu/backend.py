"""``fla``: flash-linear-attention's Triton kernels on a GPU; ``fla-interpret``: the same kernels interpreted on a CPU.

Importing this module imports neither torch nor triton nor FLA.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..spec import torch_tensors
from ..spec.backend import Backend
from ..spec.precision import NORM_INPUTS, OPERANDS, Rounding
from ..spec.problem import Problem, Result, Signature
from . import interpreter
from .families import chunk_size, family, norm_is_fused, one_token, operand_dtype
from .launching import Launch, others_installed, serving
from .versions import missing, versions

__all__ = ["FLA", "FLA_INTERPRET", "Fla", "FlaInterpret"]


class Fla(Backend):
    """The backend that computes with FLA's operations on a GPU."""

    name = "fla"
    libraries = ("torch",)
    auto = True
    priority = 10
    devices: tuple[str, ...] = ("cuda", "xpu")
    derived_stages = ("scores",)

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        why = missing()
        if why is not None:
            return why
        if interpreter.chosen():
            return f"{interpreter.VARIABLE} is on, so Triton's kernels are interpreted in this process."
        import torch

        if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
            return None
        return "there is no GPU that torch can use; fla-interpret runs the same kernels on a CPU."

    def refuses(self, s: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        if s.device not in self.devices:
            return f"these tensors are on {s.device}, and it computes on {' and '.join(self.devices)}"
        kind = family(s)
        if kind.largest_K is not None and kind.largest_K < s.K:
            return f"FLA's kernels of {s.variant} take key dims up to {kind.largest_K}, and K is {s.K}"
        if s.chunk_size is not None and s.chunk_size not in kind.chunks:
            sizes = ", ".join(map(str, kind.chunks))
            return f"FLA's kernels of {s.variant} take chunks of {sizes}, and chunk_size is {s.chunk_size}"
        return None

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by autograd, through FLA's own backward kernels."""
        from .adapter import run

        return run(problem)

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """Compute the result and the operands' cotangents with autograd.

        The result of a single token comes from the recurrent kernel, as in a call that needs no gradient.
        """
        result, found = torch_tensors.gradients(self.run, problem, cotangents)
        return self.run(problem) if one_token(problem.signature) else result, found

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """The stages of every chunk from FLA's own intermediate functions; see ``gpu.probe``."""
        from .probe import probe

        return probe(problem)

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """Convert numpy arrays to torch tensors on this backend's device."""
        tensors = torch_tensors.from_numpy(operands)
        device = self._device()
        return {name: a if name == "cu_seqlens" else a.to(device) for name, a in tensors.items()}

    def _device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "xpu"

    def rounding(self, s: Signature) -> Rounding:
        """Return FLA's roundings.

        FLA stores the states, the inverse and the written values in the inputs' dtype, and casts scores to it before
        products. It sums gates in base 2. Float32 operands enter products as TF32 on a GPU that has TF32.
        """
        dtype, single = operand_dtype(s), self._products_of_float32(s)
        kept = dict.fromkeys(OPERANDS, single if dtype == "float32" else dtype)
        if dtype != "float32":
            kept |= dict.fromkeys(family(s).wide, single)
        elif self._inverts_in_tf32(s):
            kept |= {"A": "tf32", "T": "tf32"}
        if s.norm is not None:
            kept |= dict.fromkeys(NORM_INPUTS, dtype)
        return Rounding(
            {name: to for name, to in kept.items() if to != "float32"},
            chunk_size(s),
            base2=True,
            stores=family(s).stores,
        )

    def _products_of_float32(self, s: Signature) -> str:
        """Return the precision of a call's float32 products on this device in kernels that do not specify one."""
        from .adapter import products_of_float32

        return products_of_float32(s)

    def _inverts_in_tf32(self, s: Signature) -> bool:
        """Return whether FLA's kernels invert in TF32 whatever is asked for, as they specify on GPUs that have TF32."""
        import torch

        from .adapter import settings_of

        return settings_of(s).ieee and family(s).erases and torch.cuda.get_device_capability() >= (8, 0)

    def serves(self, s: Signature) -> str:
        """Return FLA's operation for a call, with versions, and sentences on what it does not guarantee."""
        kind = family(s)
        one = one_token(s)
        name = kind.recurrent if one else kind.chunk
        words = [
            f"{name} of " + ", ".join(f"{name} {version}" for name, version in versions(("fla", "triton")).items())
        ]
        if norm_is_fused(s):
            words.append("its fused norm and gate of the output")
        if s.deterministic:
            words.append("FLA's own kernels, each in the first of its configurations that fits")
        elif others := others_installed():
            words.append(f"or another library, if it takes the call: {', '.join(others)}")
        if operand_dtype(s) == "float32" and not one:
            single = self._products_of_float32(s)
            words.append(f"products of float32 in {single.upper() if single == 'tf32' else single}")
            if self._inverts_in_tf32(s):
                words.append("but its inverses in TF32, which FLA's kernels demand")
        return "; ".join(words)

    def serving(self) -> AbstractContextManager[list[Launch]]:
        """Return a block whose list collects what computes its calls.

        Entries are launches with their configurations, and functions of other libraries.
        """
        return serving()


class FlaInterpret(Fla):
    """The backend that runs FLA's kernels in Triton's interpreter on CPU tensors, for proofs and not for speed."""

    name = "fla-interpret"
    auto = False
    priority = 90
    slow = True
    own_process = True  # the interpreter must be chosen before triton is imported
    devices = ("cpu",)

    def unavailable(self) -> str | None:
        """Return the reason why it cannot run here, or None. If only this process cannot, a new one still can."""
        return missing()

    def refuses(self, s: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        return interpreter.possible() or super().refuses(s)

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by autograd, through FLA's own backward kernels."""
        import torch

        if not torch.compiler.is_compiling():  # it cannot trace this; the operation does it at run time
            interpreter.start()
        return super().run(problem)

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """The stages of every chunk from FLA's own intermediate functions; see ``gpu.probe``."""
        interpreter.start()
        return super().probe(problem)

    def serving(self) -> AbstractContextManager[list[Launch]]:
        """Return a block whose list collects what computes its calls."""
        interpreter.start()
        return super().serving()

    def _device(self) -> str:
        return "cpu"

    def _products_of_float32(self, s: Signature) -> str:
        return "float32"

    def _inverts_in_tf32(self, s: Signature) -> bool:
        return False


FLA = Fla()
FLA_INTERPRET = FlaInterpret()
