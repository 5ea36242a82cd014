"""``xla``: the rule for JAX arrays on any device. Importing this module does not import jax."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec.backend import Backend
from ..spec.operands import BATCH_OPERANDS
from ..spec.precision import DEFAULT, FAST, HIGHEST, Rounding
from ..spec.problem import Problem, Result, Signature, UpdateResult

__all__ = ["BACKEND", "Emulated", "Xla"]

CHUNK = 64


class Xla(Backend):
    """The backend that computes JAX arrays with a scan over chunks, on any device that XLA compiles for."""

    name = "xla"
    libraries = ("jax",)
    auto = True
    priority = 30
    slow = True
    counts_axes = True
    #: Whether operands of products are rounded as on a TPU, whatever the device is.
    emulates = False

    def unavailable(self) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed; `pip install 'portable-gdn[jax]'` brings it."
        return None

    def run(self, problem: Problem) -> Result:
        """Compute a call. The result is differentiable, and every JAX transformation can trace it."""
        from .xla_chunks import compute

        return Result(
            *compute(problem.signature, chunk_size(problem.signature), problem.operands, emulate=self.emulates)
        )

    def run_with_states(self, problem: Problem, every: int) -> tuple[Result, Any]:
        """Compute a call, and the states after every ``every`` tokens of each row or packed sequence, in one pass."""
        from .xla_chunks import compute_with_states

        s, x = problem
        size = min(chunk_size(s), 1 << (every - 1).bit_length())
        result, states = compute_with_states(s, size, every, x, emulate=self.emulates)
        return Result(*result), states

    def refuses_update(self, signature: Signature) -> str | None:
        """Return the reason why it cannot compute this update, or None."""
        if signature.symbolic:
            return "the numbers of tokens and rows of an update must be known when it is compiled"
        return self.refuses(signature)

    def update(self, problem: Problem) -> UpdateResult:
        """Compute an update, and return its outputs and its pool, which takes over the memory of the given pool."""
        from .xla_update import update

        operands, pool = pool_apart(problem.operands)
        return UpdateResult(
            *update(problem.signature, chunk_size(problem.signature), operands, pool, emulate=self.emulates)
        )

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """Compute the result and the operands' cotangents in one compiled program."""
        from .xla_chunks import compute_gradients

        size = chunk_size(problem.signature)
        result, grads = compute_gradients(
            problem.signature, size, problem.operands, dict(cotangents), emulate=self.emulates
        )
        return Result(*result), grads

    #: Stages that the scan never computes; ``probe`` derives them with the scan's own solver.
    derived_stages = ("wy",)

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """Return the scan's stages of every chunk; see ``spec.probe``."""
        from .xla_chunks import probe

        return probe(problem.signature, chunk_size(problem.signature), problem.operands, self.emulates)

    def emulating(self) -> Xla:
        """Return this backend with the roundings of a TPU's matrix unit."""
        return Emulated()

    def rounding(self, signature: Signature) -> Rounding:
        """Return the rounding: float32 products on a CPU unless emulated; on a TPU, all that the precision allows."""
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


def pool_apart(operands: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate an update's operands from its pool. Integers on the host are cut to 32 bits, as in JAX."""
    limits = np.iinfo(np.int32)
    pool = {name: a for name, a in operands.items() if name.startswith("pool.")}
    rest = {
        name: np.clip(a, limits.min, limits.max).astype(np.int32)
        if name in BATCH_OPERANDS and isinstance(a, np.ndarray)
        else a
        for name, a in operands.items()
        if name not in pool
    }
    return rest, pool


def chunk_size(s: Signature) -> int:
    """Return the number of tokens per chunk: a power of two, no larger than the sequence needs."""
    if s.symbolic:
        return s.chunk_size or CHUNK
    return min(s.chunk_size or CHUNK, 1 << max(s.T - 1, 0).bit_length())


BACKEND = Xla()
