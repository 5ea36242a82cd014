"""The one table of a call's operands: their axes, dtypes, and which of them have gradients.

Whoever needs a list of operands (those with tokens, say, to cut a call in two) asks this table for it; a test sees to
it that no second list is written down.

Axes are named as the shapes in docstrings name them: B rows, T tokens, N sequences (rows, or packed ones), H key heads,
HV value heads, K and V the channels of a head, n decays per value head, C the channels of a convolution and W its taps.
Where ``rules.py`` says so an operand may come with the last two of its axes as one: z, with its heads side by side.
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
    """What is known of an operand whatever the call.

    Attributes:
        name: by which calls, files and reports know it.
        axes: in order; one in brackets may be absent. An axis that is longer or shorter than its dimension ("N + 1"
            boundaries) is none of that dimension's.
        dtypes: those that a call takes.
        differentiable: whether it has a gradient.
        gate: whether it says how much of a token is kept, erased or written.
        output: whether it acts on the rule's output alone, behind everything else.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    differentiable: bool = True
    gate: bool = False
    output: bool = False


#: Every operand of every call. A rule has q, k and v; a mixer these or qkv, and the convolution's. Without beta there
#: are erase and write, one of them, or neither (``variants.py``).
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

#: What an update of a pool of states takes beside the operands of a call, whose tokens then have no rows: [T, ...].
#: S slots, of which slot 0 is null; R tokens that wait in each; P columns of slots for checkpoints.
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
    """The place in a pool, ``pool.window[name]``, where an operand's tokens wait until they are accepted.

    Inputs wait in the call's own dtype and gates in float32, so that what is computed from them again is the same.

    Args:
        name: an operand with tokens. dtype: the dtype of the call's inputs.
    """
    axes = tuple(axis for axis in OPERANDS[name].axes if axis not in ("B", "T"))
    return Operand(
        f"pool.window.{name}",
        ("S", "R", *axes),
        ("float32",) if OPERANDS[name].gate else (dtype,),
        differentiable=False,
    )


#: Operands that may lie on the host, as numpy arrays too, whatever the others are.
ON_HOST = ("cu_seqlens", *BATCH_OPERANDS)


def along(axis: str) -> tuple[str, ...]:
    """Names of the operands that have this axis ("T", "B", "N", "HV", ...), in the table's order."""
    return tuple(name for name, operand in OPERANDS.items() if axis in operand.axes)


#: Operands that have a gradient.
DIFFERENTIABLE = tuple(name for name, operand in OPERANDS.items() if operand.differentiable)
#: Operands with a value for every token, masks and ids among them.
WITH_TOKENS = along("T")
#: Those of them that are numbers.
PER_TOKEN = tuple(name for name in WITH_TOKENS if OPERANDS[name].differentiable)
#: The gates: log decay, erase and write.
GATES = tuple(name for name, operand in OPERANDS.items() if operand.gate)
#: Those of them that are strengths, in [0, 2]: erase and write, or beta in place of both.
WRITE_GATES = tuple(name for name in GATES if name != "g")
#: What carries the tokens' contents: q, k, v, or all of them side by side.
INPUTS = tuple(name for name in PER_TOKEN if name not in GATES and not OPERANDS[name].output)


def at_tokens(x: Mapping[str, Array], where: Any) -> dict[str, Array]:
    """The operands, those with tokens at some of them.

    Args:
        x: operands by name.
        where: a slice, or an index that arrays of their library take along the second axis.
    """
    return {name: a[:, where] if name in WITH_TOKENS else a for name, a in x.items()}


def one_token(x: Mapping[str, Array]) -> dict[str, Array]:
    """The operands of a single step [B, ...] as those of a sequence of one token [B, 1, ...]."""
    return {name: a[:, None] if name in WITH_TOKENS else a for name, a in x.items()}


def without_tokens(x: Mapping[str, Array]) -> dict[str, Array]:
    """The way back: the operands (or gradients) of one token without the axis of tokens."""
    return {name: a[:, 0] if name in WITH_TOKENS else a for name, a in x.items()}
