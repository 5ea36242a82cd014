"""``numpy``: the float64 oracle as a backend, for numpy arrays. Exact and slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec.backend import Backend
from ..spec.evaluate import FLOAT64, Evaluation, evaluate, matmul
from ..spec.oracle import CoreRule, token_by_token
from ..spec.probe import probe
from ..spec.problem import Problem, Result, Signature
from ..spec.stages import Algebra

__all__ = ["BACKEND", "Numpy"]

CHUNK = 64  # tokens per chunk of the stages; the oracle itself computes token by token


class Numpy(Backend):
    """The backend that computes numpy arrays with the oracle."""

    name = "numpy"
    libraries: tuple[str, ...] = ("numpy",)
    auto = True
    priority = 50
    rule: CoreRule = staticmethod(token_by_token)

    def run(self, problem: Problem) -> Result:
        """Compute in float64; o is rounded to v's dtype and states to float32."""
        return self._result(problem.signature, evaluate(problem, None, self.rule))

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """Compute the result and the operands' exact cotangents, rounded to the operands' dtypes."""
        e = evaluate(problem, cotangents, self.rule)
        grads = {name: a.astype(problem.operands[name].dtype) for name, a in e.gradients.items()}
        return self._result(problem.signature, e), grads

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """Return the specification's stages of every chunk, in float64; see ``spec.probe``."""
        s, operands = problem
        return probe(Algebra(FLOAT64, matmul), s, operands, s.chunk_size or CHUNK)

    @staticmethod
    def _result(s: Signature, e: Evaluation) -> Result:
        import ml_dtypes

        dtype = ml_dtypes.bfloat16 if s.dtype == "bfloat16" else s.dtype
        state = e.state.astype(np.float32) if s.output_final_state else None
        return Result(e.o.astype(dtype), state, None if e.conv_state is None else e.conv_state.astype(np.float32))


BACKEND = Numpy()
