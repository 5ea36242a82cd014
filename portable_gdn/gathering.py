"""The arguments of the public calls, collected into operands and options."""

from __future__ import annotations

from typing import Any

from .spec.conv import ShortConv
from .spec.errors import bad
from .spec.gates import BoundedGate, SoftplusGate
from .spec.norm import GatedRMSNorm
from .spec.problem import GateKind, NormKind

__all__ = ["add", "gate_kind", "mixer_operands"]

Array = Any


def mixer_operands(
    qkv: Any,
    conv: Any,
    output_norm: Any,
    gate: SoftplusGate | BoundedGate | None,
    state: Any,
    others: dict[str, Array | None],
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Collect the operands of a mixer by name, and the parts of convolution, gate and norm that become options.

    Args:
        qkv, conv, output_norm, gate, state: The arguments of the call with these names.
        others: The other operands of the call by name.

    Returns:
        The operands by name, and keyword arguments for ``Options``.

    Raises:
        GdnError: An argument has the wrong type or form.
    """
    if not isinstance(conv, ShortConv):
        raise bad("conv", f"a {type(conv).__name__}", "be a ShortConv")
    if conv.weight is None:
        raise bad("conv.weight", "None", "be an array [channels, W]")
    if output_norm is not None and not isinstance(output_norm, GatedRMSNorm):
        raise bad("output_norm", f"a {type(output_norm).__name__}", "be None or a GatedRMSNorm")
    if state is not None and not (isinstance(state, tuple) and len(state) == 2):
        raise bad("state", f"a {type(state).__name__}", "be None or a MixerState")
    recurrent, before = (None, None) if state is None else state
    if isinstance(qkv, (tuple, list)):
        if len(qkv) != 3:
            raise bad("qkv", f"a sequence of {len(qkv)} arrays", "be one array, or three: q, k, v")
        operands = dict(zip("qkv", qkv, strict=True))
    else:
        operands = {"qkv": qkv}
    add(operands, conv_weight=conv.weight, conv_bias=conv.bias, conv_state=before)
    kinds: dict[str, Any] = {"conv_activation": conv.activation, "gate": gate_kind(operands, gate), "norm": None}
    if output_norm is not None:
        add(operands, norm_weight=output_norm.weight)
        kinds["norm"] = NormKind(output_norm.eps, output_norm.activation)
    add(operands, initial_state=recurrent, **others)
    return operands, kinds


def add(operands: dict[str, Array], **named: Array | None) -> None:
    """Add the named arrays that are not None to the operands."""
    for name, x in named.items():
        if x is not None:
            operands[name] = x


def gate_kind(operands: dict[str, Array], gate: SoftplusGate | BoundedGate | None) -> GateKind | None:
    """Add the parameters of a gate to the operands; return its kind for the options, or None without a gate."""
    if gate is None:
        return None
    if not isinstance(gate, (SoftplusGate, BoundedGate)):
        raise bad("gate", f"a {type(gate).__name__}", "be None, a SoftplusGate or a BoundedGate")
    if isinstance(gate, BoundedGate) and gate.lower_bound is None:
        raise bad("gate.lower_bound", "None", "lie in [-5, 0)")
    add(operands, A_log=gate.A_log, dt_bias=gate.dt_bias)
    return GateKind(gate.lower_bound if isinstance(gate, BoundedGate) else None)
