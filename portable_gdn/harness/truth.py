"""What a case's results must be: by the oracle, and how far a declared rounding may be from it, each computed once."""

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
    """Exact results of one case, and expectations by rounding."""

    def __init__(self, inputs: Inputs, gradients: bool = True) -> None:
        # A copy of the dict: the door may put another form of an operand into it. The oracle knows no precision, and
        # chunks that a backend cannot have are no concern of its.
        options = inputs.options._replace(precision=None, chunk_size=None)
        self.problem, _ = door.normalise(dict(inputs.operands), options, "numpy", check_values=True)
        self.cotangents = inputs.cotangents if gradients else None
        self.exact = evaluated(self.problem, self.cotangents)
        self._expected: dict[Any, Expectation] = {}

    def expectation(self, rounding: Rounding | None) -> Expectation:
        """What separates a backend that rounds like this from the exact results; None: what separates any."""
        key = None if rounding is None else rounding.key()
        if key not in self._expected:
            self._expected[key] = expect(self.problem, self.cotangents, rounding, self.exact)
        return self._expected[key]

    def by_stages(self) -> Expectation:
        """The stages in float64 as the exact results, which judge the oracle in their turn."""
        expectation = self.expectation(Rounding())
        e = evaluated(self.problem, self.cotangents, chunk_by_chunk())
        exact: dict[str, np.ndarray] = {"o": e.o, "state": e.state}
        exact |= {f"grad_{name}": a for name, a in e.gradients.items()}
        return expectation._replace(exact={**expectation.exact, **exact})
