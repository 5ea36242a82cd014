"""The table of a call's operands: their axes, their dtypes, and which of them have gradients.

Code that needs a list of operands (all operands with tokens, for example, to cut a call in two) takes it from this
table. A test ensures that there is no second list.

Axes have the names that docstrings use in shapes: B rows, T tokens, N sequences (rows or packed ones), H key heads, HV
value heads, K key and V value channels per head, n decays per value head, C channels of the convolution and W its taps.
``rules.py`` lets some operands have their last two axes merged into one, such as z with its heads side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [
    "BATCH_OPERANDS",
    "DIFFERENTIABLE",
    "FLOATS",
    "GATES",
    "INPUTS",
    "INPUT_DTYPES",
    "INTEGERS",
    "ON_HOST",
    "OPERANDS",
    "PER_TOKEN",
    "POOL_OPERANDS",
    "WITH_TOKENS", "WRITE_GATES",
    "Operand",
    "along",
    "at_tokens",

    "one_token",
    "window_operand",
    "without_tokens",
]  # fmt: skip

Array = Any

INPUT_DTYPES = ("float32", "bfloat16", "float16")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_STATES, _BOOL = ("float32",), ("bool",)
_POOLED = ("float32", "bfloat16")


class Operand(NamedTuple):
    """The properties that an operand has in every call.

    Attributes:
        name: its name in calls, files and reports.
        axes: the names of its axes, in order; an axis in brackets may be absent. An axis whose length is not the
            dimension itself (the "N + 1" of boundaries) does not count as an axis of that dimension.
        dtypes: the dtypes that a call accepts.
        differentiable: whether it has a gradient.
        gate: whether it is a gate, which controls how much is kept, erased or written.
        output: whether it acts only on the output of the rule, after everything else.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    differentiable: bool = True
    gate: bool = False
    output: bool = False


#: Every operand of every call. A call of the rule has q, k and v; a mixer call has these or qkv, and the convolution's
#: operands. A call without beta has erase and write, one of them, or neither (``variants.py``).
OPERANDS: dict[str, Operand] = {
    operand.name: operand
    for operand in (
        Operand("q", ("B", "T", "H", "K"), INPUT_DTYPES),
        Operand("k", ("B", "T", "H", "K"), INPUT_DTYPES),
        Operand("v", ("B", "T", "HV", "V"), INPUT_DTYPES),
        Operand("qkv", ("B", "T", "C"), INPUT_DTYPES),
        Operand("g", ("B", "T", "HV", "[n]"), FLOATS, gate=True),
        Operand("beta", ("B", "T", "HV"), FLOATS, gate=True),
        Operand("erase", ("B", "T", "HV", "[K]"), FLOATS, gate=True),
        Operand("write", ("B", "T", "HV", "[V]"), FLOATS, gate=True),
        Operand("initial_state", ("N", "HV", "K", "V"), _STATES),
        Operand("A_log", ("HV",), FLOATS),
        Operand("dt_bias", ("HV * n",), FLOATS),
        Operand("conv_weight", ("C", "W"), FLOATS),
        Operand("conv_bias", ("C",), FLOATS),
        Operand("conv_state", ("N", "W - 1", "C"), FLOATS),
        Operand("z", ("B", "T", "HV", "V"), FLOATS, output=True),
        Operand("norm_weight", ("V",), FLOATS, output=True),
        Operand("cu_seqlens", ("N + 1",), INTEGERS, differentiable=False),
        Operand("segment_ids", ("B", "T"), INTEGERS, differentiable=False),
        Operand("mask", ("B", "T"), _BOOL, differentiable=False),
    )
}

#: The operands that an update of a pool of states has in addition to those of a call, whose tokens are then [T, ...].
#: S is the number of slots (slot 0 is null), R that of the tokens that wait in each, P that of columns of checkpoints.
POOL_OPERANDS: dict[str, Operand] = {
    operand.name: operand
    for operand in (
        Operand("pool.recurrent", ("S", "HV", "K", "V"), _POOLED, differentiable=False),
        Operand("pool.conv", ("S", "W - 1", "C"), INPUT_DTYPES, differentiable=False),
        Operand("pool.pending", ("S",), ("int32",), differentiable=False),
    )
}
BATCH_OPERANDS: dict[str, Operand] = {
    operand.name: operand
    for operand in (
        Operand("batch.query_start_loc", ("N + 1",), INTEGERS, differentiable=False),
        Operand("batch.state_indices", ("N",), INTEGERS, differentiable=False),
        Operand("batch.num_computed_tokens", ("N",), INTEGERS, differentiable=False),
        Operand("batch.num_accepted_tokens", ("N",), INTEGERS, differentiable=False),
        Operand("batch.read_state_indices", ("N",), INTEGERS, differentiable=False),
        Operand("batch.checkpoint_indices", ("N", "P"), INTEGERS, differentiable=False),
    )
}


def window_operand(name: str, dtype: str) -> Operand:
    """Return the operand ``pool.window[name]``, in which tokens of another operand wait until they are accepted.

    Inputs wait in the dtype of the call and gates in float32, so that computing them again gives equal results.

    Args:
        name: an operand with tokens.
        dtype: the dtype of the call's inputs.
    """
    axes = tuple(axis for axis in OPERANDS[name].axes if axis not in ("B", "T"))
    return Operand(
        f"pool.window.{name}",
        ("S", "R", *axes),
        ("float32",) if OPERANDS[name].gate else (dtype,),
        differentiable=False,
    )


#: Operands that may be on the host, also as numpy arrays, wherever the other operands are.
ON_HOST = ("cu_seqlens", *BATCH_OPERANDS)


def along(axis: str) -> tuple[str, ...]:
    """Return the names of the operands that have this axis ("T", "B", "N", "HV", ...), in the table's order."""
    return tuple(name for name, operand in OPERANDS.items() if axis in operand.axes)


#: Operands that have a gradient.
DIFFERENTIABLE = tuple(name for name, operand in OPERANDS.items() if operand.differentiable)
#: Operands with a value for every token, including masks and ids.
WITH_TOKENS = along("T")
#: The operands with tokens whose values are real numbers.
PER_TOKEN = tuple(name for name in WITH_TOKENS if OPERANDS[name].differentiable)
#: The gates: log decay, erase and write.
GATES = tuple(name for name, operand in OPERANDS.items() if operand.gate)
#: The gates whose values lie in [0, 2]: erase and write, or beta in place of both.
WRITE_GATES = tuple(name for name in GATES if name != "g")
#: The inputs: q, k and v, or all three side by side in one array.
INPUTS = tuple(name for name in PER_TOKEN if name not in GATES and not OPERANDS[name].output)


def at_tokens(x: Mapping[str, Array], where: Any) -> dict[str, Array]:
    """Return the operands, with those that have tokens cut to some of their tokens.

    Args:
        x: operands by name.
        where: a slice, or an index that arrays of their library accept along the second axis.
    """
    return {name: a[:, where] if name in WITH_TOKENS else a for name, a in x.items()}


def one_token(x: Mapping[str, Array]) -> dict[str, Array]:
    """Return the operands of a single step [B, ...] as operands of a sequence of one token [B, 1, ...]."""
    return {name: a[:, None] if name in WITH_TOKENS else a for name, a in x.items()}


def without_tokens(x: Mapping[str, Array]) -> dict[str, Array]:
    """Return the operands (or gradients) of one token without the axis of tokens: the inverse of ``one_token``."""
    return {name: a[:, 0] if name in WITH_TOKENS else a for name, a in x.items()}
