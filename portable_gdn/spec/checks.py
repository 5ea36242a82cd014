"""Checks of an operand's shape and dtype, which raise errors in whole sentences."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import bad
from .operands import OPERANDS, Operand
from .problem import Meta

__all__ = ["dtype", "expect", "rank", "shape_of", "takes"]


def shape_of(shape: tuple[int, ...]) -> str:
    """Return a shape as error messages write it, such as "[2, 3]"."""
    return "[" + ", ".join(str(n) for n in shape) + "]"


def expect(meta: Mapping[str, Meta], name: str, shape: tuple[int, ...], form: str) -> None:
    """Refuse an operand whose shape is not ``shape``; ``form`` names the axes of that shape."""
    given = meta[name].shape
    if tuple(given) != shape:
        raise bad(name, f"of shape {shape_of(given)}", f"have shape {form} = {shape_of(shape)}")


def rank(meta: Mapping[str, Meta], name: str, form: str) -> tuple[int, ...]:
    """Return an operand's shape, after checking that it has as many axes as ``form`` names."""
    shape = meta[name].shape
    if len(shape) != form.count(",") + 1:
        raise bad(name, f"of shape {shape_of(shape)}", f"have {form.count(',') + 1} dimensions, {form}")
    return shape


def dtype(meta: Mapping[str, Meta], *names: str) -> None:
    """Refuse any of the named operands that the call has in a dtype that the table of operands does not allow."""
    for name in names:
        if name in meta:
            takes(meta, OPERANDS[name])


def takes(meta: Mapping[str, Meta], operand: Operand) -> None:
    """Refuse an operand in a dtype that it does not allow."""
    given = meta[operand.name].dtype
    if given not in operand.dtypes:
        one_of = f"be one of {', '.join(operand.dtypes)}" if len(operand.dtypes) > 1 else f"be {operand.dtypes[0]}"
        raise bad(operand.name, f"of dtype {given}", one_of)
