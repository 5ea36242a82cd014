"""The exact results of a case, and the error that each declared rounding may have, each computed only once."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import door
from ..spec.evaluate import chunk_by_chunk
from ..spec.precision import Rounding
from .cases import Inputs
from .judge import Expectation, evaluated, expect

__all__ = ["Truth"]


class Truth:
    """The exact results of one case, and the expectation for each rounding."""

    def __init__(self, inputs: Inputs, gradients: bool = True) -> None:
        # A copy of the dict, since normalising the call may replace an operand in it by another form. The oracle
        # ignores the precision, and chunk sizes that a backend does not support.
        options = inputs.options._replace(precision=None, chunk_size=None)
        self.problem, _ = door.normalise(dict(inputs.operands), options, "numpy", check_values=True)
        self.cotangents = inputs.cotangents if gradients else None
        self.exact = evaluated(self.problem, self.cotangents)
        self._expected: dict[Any, Expectation] = {}

    def expectation(self, rounding: Rounding | None) -> Expectation:
        """Return how much a backend with this rounding may differ from the exact results; None is for any backend."""
        key = None if rounding is None else rounding.key()
        if key not in self._expected:
            self._expected[key] = expect(self.problem, self.cotangents, rounding, self.exact)
        return self._expected[key]

    def by_stages(self) -> Expectation:
        """Return an expectation with the float64 stages as the exact results, by which the oracle itself is judged."""
        expectation = self.expectation(Rounding())
        e = evaluated(self.problem, self.cotangents, chunk_by_chunk())
        exact: dict[str, np.ndarray] = {"o": e.o, "state": e.state}
        exact |= {f"grad_{name}": a for name, a in e.gradients.items()}
        return expectation._replace(exact={**expectation.exact, **exact})
