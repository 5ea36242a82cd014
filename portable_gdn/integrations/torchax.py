"""``torchax``: torch tensors on a TPU, by the Pallas kernels.

torchax makes tensors of JAX arrays (``tensor.to("jax")``) and computes with them within ``torchax.default_env()``. A
call on such tensors goes to ``pallas`` where that computes it and to ``xla`` elsewhere, and torch's autograd gets the
gradient that JAX derives of it. Importing this module imports neither torch, jax nor torchax.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from .. import dispatch
from ..spec import torch_tensors
from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.operands import DIFFERENTIABLE
from ..spec.precision import Rounding
from ..spec.problem import Problem, Result, Signature

__all__ = ["BACKEND", "Torchax"]


class Torchax(Backend):
    """Calls on torchax's tensors, by the backends for JAX arrays."""

    libraries = ("torch",)
    priority = 15
    slow = True

    def __init__(self, name: str = "torchax", kernels: str = "pallas") -> None:
        """``kernels``: the backend for JAX arrays that computes what it can; another name than its own for another."""
        self.name, self._kernels = name, kernels
        self.auto = kernels == "pallas"

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        for module in ("torch", "jax", "torchax"):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed; `pip install {module}` brings it."
        return None

    def not_here(self) -> str | None:
        """Why no tensor of this process can be computed by it."""
        return self.unavailable() or dispatch.get(self._kernels).not_here()

    def refuses(self, signature: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        if signature.device != "jax":
            return f"these tensors are on {signature.device}, and it takes those that torchax made of JAX arrays"
        return None

    def _for_jax(self, s: Signature, platform: str) -> tuple[Signature, Any]:
        """The signature of the same call on JAX arrays, and the backend that computes it."""
        there = replace(s, library="jax", device=platform)
        kernels = dispatch.get(self._kernels)
        return there, kernels if kernels.refuses(there) is None else dispatch.get("xla")

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by torch's autograd."""
        import torchax
        from torchax.interop import jax_view

        s, x = problem
        with torchax.default_env():
            arrays = {name: jax_view(a) if hasattr(a, "jax") else torch_tensors.on_host(a) for name, a in x.items()}
            platform = _platform(arrays["qkv" if "qkv" in arrays else "q"])
            there, backend = self._for_jax(s, platform)
            smooth = [name for name in arrays if name in DIFFERENTIABLE]

            def call(*leaves: Any) -> tuple[Any, ...]:
                return tuple(backend.run(Problem(there, {**arrays, **dict(zip(smooth, leaves, strict=True))})))

            return Result(*_function().apply(call, *[x[name] for name in smooth]))

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """The result and the operands' cotangents, by torch's autograd."""
        import torchax

        with torchax.default_env():
            return torch_tensors.gradients(self.run, problem, cotangents)

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """numpy arrays as torchax tensors; boundaries stay on the host."""
        import torchax

        tensors = torch_tensors.from_numpy(operands)
        with torchax.default_env():
            return {name: a if name == "cu_seqlens" else a.to("jax") for name, a in tensors.items()}

    def to_numpy(self, array: Any) -> Any:
        """The contents of a tensor."""
        import numpy as np
        from torchax.interop import jax_view

        return np.asarray(jax_view(array.detach()))

    def rounding(self, signature: Signature) -> Rounding:
        """What the backend for JAX arrays rounds."""
        import jax

        there, backend = self._for_jax(signature, jax.default_backend())
        return backend.rounding(there)

    def serves(self, signature: Signature) -> str:
        """Which backend for JAX arrays computes it."""
        import jax

        return self._for_jax(signature, jax.default_backend())[1].name

    def serves_call(self, problem: Problem) -> str:
        """Which backend for JAX arrays computes it; of a traced call, what the compiled program holds."""
        from torchax.interop import jax_view

        s, x = problem
        given = x["qkv" if "qkv" in x else "q"]
        there, backend = self._for_jax(s, _platform(jax_view(given) if hasattr(given, "jax") else given))
        plan = backend.serves(there)
        return dispatch.where(backend, there) + (f": {plan}" if plan else "")


def _platform(x: Any) -> str:
    """The platform that a JAX array lives on, or "traced" under a trace."""
    import jax

    return "traced" if isinstance(x, jax.core.Tracer) else next(iter(x.devices())).platform


@cache
def _function() -> Any:
    """The call as a function that torch's autograd knows."""
    import jax
    import torch
    from torchax.interop import jax_view, torch_view

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Any, *leaves: Any) -> Any:
            if not any(ctx.needs_input_grad):
                return torch_view(call(*jax_view(leaves)))
            found, ctx.pull = jax.vjp(call, *jax_view(leaves))
            return torch_view(found)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            if torch.is_grad_enabled():
                raise GdnError("create_graph is True; a second derivative of torchax tensors is not offered.")
            return None, *torch_view(ctx.pull(jax_view(cotangents)))

    return Call


BACKEND = Torchax()
