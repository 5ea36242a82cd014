"""How a call is computed on a TPU: the chip, the mode, the kernels and their plans, resolved once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from ..spec.problem import Signature
from .chips import Chip
from .kernels.common.gate_widths import widths
from .kernels.common.tiles import CHUNK
from .kernels.pipelined.backward_plan import Reverse, reverse_plan
from .kernels.pipelined.geometry import Pipeline
from .kernels.pipelined.plan import pipeline
from .kernels.plain import stages as own_stages
from .kernels.plain.plan import Plan, backward_plan, plan

__all__ = ["Execution", "Other", "Outputs", "Training"]

Array = Any
#: o, states and convolution state of a call.
Outputs = tuple[Array, Array | None, Array | None]
#: Computes the same call without the kernels.
Other = Callable[[Signature, dict[str, Array]], Outputs]


@dataclass(frozen=True)
class Training:
    """The plans of a call whose gradients are computed by kernels: the forward pass, which saves what the backward pass
    needs, and the backward pass."""

    forward: Pipeline | Plan
    backward: Reverse | Plan


@dataclass(frozen=True, eq=False)
class Execution:
    """A call, and how it is computed. Hashable, so that it can be a static argument of a compiled function.

    Attributes:
        signature: The signature of the call.
        chip: The chip for which the plans are made.
        interpret: False (for a TPU), True or ``pltpu.InterpretParams``.
        stages: The functions that plain kernels are made of; replacing ``plain.stages`` tests the effect of faults.
        other: Another backend's function for the call. With ``choose``, the lowering uses it on platforms other than a
            TPU, and where XLA partitions the program. It is also differentiated for second derivatives, and for calls
            without a backward kernel.
        choose: Whether the lowering chooses between the two, unless kernels are interpreted.
    """

    signature: Signature
    chip: Chip
    interpret: Any
    stages: ModuleType | Any
    other: Other
    choose: bool

    def _key(self) -> tuple[Any, ...]:
        return self.signature, self.chip, self.interpret, self.stages, self.other, self.choose

    @cached_property
    def _hash(self) -> int:
        return hash(self._key())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Execution) and self._key() == other._key())

    @property
    def own(self) -> bool:
        """Whether the kernels are made of their own stages; only plain kernels can be made of others."""
        return self.stages is own_stages

    @cached_property
    def forward(self) -> Pipeline | Plan:
        """The plan of the forward pass without residuals."""
        return self._pipeline() or plan(self.signature, self.chip)

    @cached_property
    def with_states(self) -> Pipeline | None:
        """The plan of a forward pass that saves the state before each chunk, if the pipelined kernel supports it."""
        return self._pipeline(("S",))

    @cached_property
    def training(self) -> Training | None:
        """The plans of both passes, or None if ``other`` computes the gradients."""
        s = self.signature
        pair = reverse_plan(s, self.chip) if self.own else None
        if pair is not None:
            return Training(*pair)
        p = backward_plan(s, self.chip)
        if p is None:
            return None
        line = None
        if p.C == CHUNK:
            solved = ("S", "M", "u", "Aqk") if p.widths.erase else ("S", "Aqk")
            line = self._pipeline(solved if widths(s).decay == s.K else ("S",))
        return Training(line or p._replace(widths=widths(s)), p)

    def _pipeline(self, keeps: tuple[str, ...] = ()) -> Pipeline | None:
        return pipeline(self.signature, self.chip, keeps) if self.own else None

    def of(self, signature: Signature) -> Execution:
        """Return the execution of another call for the same chip and mode."""
        return replace(self, signature=signature)
