"""``xla``: the rule for JAX arrays on any device. Importing this module does not import jax."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from ..spec.backend import Backend
from ..spec.precision import DEFAULT, FAST, HIGHEST, Rounding
from ..spec.problem import Problem, Result, Signature

__all__ = ["BACKEND", "Emulated", "Xla"]

CHUNK = 64


class Xla(Backend):
    """A scan over chunks, for whatever XLA compiles for."""

    name = "xla"
    libraries = ("jax",)
    auto = True
    priority = 30
    slow = True
    counts_axes = True
    #: Whether operands of products are rounded here as a TPU rounds them, whatever the device.
    emulates = False

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed; `pip install 'portable-gdn[jax]'` brings it."
        return None

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable, and traceable by every JAX transformation."""
        from .xla_chunks import compute

        return Result(
            *compute(problem.signature, chunk_size(problem.signature), problem.operands, emulate=self.emulates)
        )

    def run_with_states(self, problem: Problem, every: int) -> tuple[Result, Any]:
        """Compute, and the states after every so many tokens of each row or packed sequence, in one pass."""
        from .xla_chunks import compute_with_states

        s, x = problem
        size = min(chunk_size(s), 1 << (every - 1).bit_length())
        result, states = compute_with_states(s, size, every, x, emulate=self.emulates)
        return Result(*result), states

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """The result and the operands' cotangents, in one compiled program."""
        from .xla_chunks import compute_gradients

        size = chunk_size(problem.signature)
        result, grads = compute_gradients(
            problem.signature, size, problem.operands, dict(cotangents), emulate=self.emulates
        )
        return Result(*result), grads

    #: Stages that the scan never forms: ``probe`` derives them with its own solver.
    derived_stages = ("wy",)

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """The scan's stages of every chunk; see ``spec.probe``."""
        from .xla_chunks import probe

        return probe(problem.signature, chunk_size(problem.signature), problem.operands, self.emulates)

    def emulating(self) -> Xla:
        """This backend with the roundings of a TPU's matrix unit."""
        return Emulated()

    def rounding(self, signature: Signature) -> Rounding:
        """On a CPU products are float32, unless emulated; on a TPU they round what the precision allows."""
        size = chunk_size(signature)
        if signature.device == "cpu" and not self.emulates:
            return Rounding(HIGHEST, size)
        allowed = {"highest": HIGHEST, "default": DEFAULT, "fast": FAST}[signature.precision]
        if signature.device in ("gpu", "cuda", "rocm"):
            allowed = {name: "tf32" for name, kept in allowed.items() if kept != "float32"}
        return Rounding(allowed, size)


class Emulated(Xla):
    """``xla`` with the roundings of a TPU's matrix unit, to predict its error on a machine without one."""

    auto = False
    emulates = True


def chunk_size(s: Signature) -> int:
    """Tokens a chunk: a power of two, no larger than the sequence needs."""
    if s.symbolic:
        return s.chunk_size or CHUNK
    return min(s.chunk_size or CHUNK, 1 << max(s.T - 1, 0).bit_length())


BACKEND = Xla()
