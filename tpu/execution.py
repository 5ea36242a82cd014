"""How a call is computed on a TPU, resolved once: for which chip, in which mode, by which kernels and plans."""

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
    """The plans of a call whose gradients kernels compute: of the forward pass, which keeps what the backward pass
    needs, and of that."""

    forward: Pipeline | Plan
    backward: Reverse | Plan


@dataclass(frozen=True, eq=False)
class Execution:
    """A call, and what computes it. Hashable, so that it can be the static argument of a compiled function.

    Attributes:
        signature: the call.
        chip: the one that the plans are for.
        interpret: False (for a TPU), True or ``pltpu.InterpretParams``.
        stages: the functions that plain kernels are made of; other ones than ``plain.stages`` test what a fault does.
        other: what the lowering takes for anything but a TPU, and where XLA partitions the program, if ``choose``; and
            what is differentiated for second derivatives, and where there is no backward kernel for the call.
        choose: leave it to the lowering which of both to take, unless interpreted.
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
        """Whether the kernels are made of their own stages; only the plain ones can be made of others."""
        return self.stages is own_stages

    @cached_property
    def forward(self) -> Pipeline | Plan:
        """The plan of the forward pass alone."""
        return self._pipeline() or plan(self.signature, self.chip)

    @cached_property
    def with_states(self) -> Pipeline | None:
        """The plan of a forward pass that keeps the state before each chunk, if the pipelined kernel does that."""
        return self._pipeline(("S",))

    @cached_property
    def training(self) -> Training | None:
        """The plans of both passes, or None where ``other`` computes the gradients."""
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
        """The execution of another call by the same chip and mode."""
        return replace(self, signature=signature)
