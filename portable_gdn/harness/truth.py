"""What a case's results must be: by the oracle, and how far a declared rounding may be from it, each computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from .. import door
from ..spec.evaluate import Evaluation, chunk_by_chunk, evaluate
from ..spec.precision import Rounding
from .cases import Inputs
from .judge import Expectation, Tensors, expect

__all__ = ["Truth"]

#: numpy's products here are small: a second thread of its BLAS waits, by spinning, ten times as long as it helps.
_BLAS = ThreadpoolController()


def _one_thread() -> Any:
    return _BLAS.limit(limits=1, user_api="blas")


class Truth:
    """Exact results of one case, and expectations by rounding."""

    def __init__(self, inputs: Inputs, gradients: bool = True) -> None:
        # A copy of the dict: the door may put another form of an operand into it. The oracle knows no precision, and
        # chunks that a backend cannot have are no concern of its.
        options = inputs.options._replace(precision=None, chunk_size=None)
        self.problem, _ = door.normalise(dict(inputs.operands), options, "numpy", check_values=True)
        self.cotangents = inputs.cotangents if gradients else None
        with _one_thread():
            self.exact = evaluate(self.problem, self.cotangents)
        self._expected: dict[Any, Expectation] = {}

    def expectation(self, rounding: Rounding | None) -> Expectation:
        """What separates a backend that rounds like this from the exact results; None: what separates any."""
        key = None if rounding is None else rounding.key()
        if key not in self._expected:
            with _one_thread():
                found = expect(self.problem, self.cotangents, rounding, self.exact)

            def largest() -> Tensors:
                with _one_thread():
                    return found.largest()

            self._expected[key] = found._replace(largest=largest)
        return self._expected[key]

    def by_stages(self) -> Expectation:
        """The stages in float64 as the exact results, which judge the oracle in their turn."""
        expectation = self.expectation(Rounding())
        with _one_thread():
            e: Evaluation = evaluate(self.problem, self.cotangents, chunk_by_chunk())
        exact: dict[str, np.ndarray] = {"o": e.o, "state": e.state}
        exact |= {f"grad_{name}": a for name, a in e.gradients.items()}
        return expectation._replace(exact={**expectation.exact, **exact})
