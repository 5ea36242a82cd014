"""Arguments as a user types them, gathered into operands and options."""

from __future__ import annotations

from typing import Any

from .spec.errors import bad
from .spec.gates import BoundedGate, SoftplusGate
from .spec.problem import GateKind

__all__ = ["add", "gate_kind"]

Array = Any


def add(operands: dict[str, Array], **named: Array | None) -> None:
    """Put those of the arrays that are there among the operands."""
    for name, x in named.items():
        if x is not None:
            operands[name] = x


def gate_kind(operands: dict[str, Array], gate: SoftplusGate | BoundedGate | None) -> GateKind | None:
    """Put the gate's parameters among the operands; what is left of it, or None without a gate."""
    if gate is None:
        return None
    if not isinstance(gate, (SoftplusGate, BoundedGate)):
        raise bad("gate", f"a {type(gate).__name__}", "be None, a SoftplusGate or a BoundedGate")
    if isinstance(gate, BoundedGate) and gate.lower_bound is None:
        raise bad("gate.lower_bound", "None", "lie in [-5, 0)")
    add(operands, A_log=gate.A_log, dt_bias=gate.dt_bias)
    return GateKind(gate.lower_bound if isinstance(gate, BoundedGate) else None)
