"""Store the states of a slot in fewer bytes: each head has its own dtype, chosen to keep the error within a limit.

| dtype | bytes per number | precision |
|---|---|---|
| float32 | 4 | exact |
| int16 | 2 | 15 bits below the head's largest number; one float32 scale per head |
| bfloat16 | 2 | 8 significant bits of each number |
| int8 | 1 | 7 bits below the largest number of a key channel's row; one float32 scale per row |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..spec.errors import bad

__all__ = ["DTYPES", "PackedStates", "choose_dtypes", "pack", "unpack"]

#: The dtypes of states at rest, the more exact first; of two of one size that with the smaller error.
DTYPES = ("float32", "int16", "bfloat16", "int8")
#: Bytes of a number; scales add 4 a head or a row.
BYTES = {"float32": 4, "int16": 2, "bfloat16": 2, "int8": 1}
_LARGEST = {"int16": 32767, "int8": 127}
#: Axes over which numbers [heads, K, V] share a scale.
_SHARED = {"int16": (1, 2), "int8": (2,)}


class PackedStates(NamedTuple):
    """States [HV, K, V] with a dtype per head.

    Attributes:
        dtypes: The dtype of each head.
        parts: For each dtype, the states of its heads in ascending order [heads, K, V].
        scales: For each integer dtype, its scales in float32: [heads, 1, 1] (int16) or [heads, K, 1] (int8).
    """

    dtypes: tuple[str, ...]
    parts: dict[str, np.ndarray]
    scales: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(a.nbytes for a in (*self.parts.values(), *self.scales.values()))


def pack(states: np.ndarray, dtypes: str | Sequence[str]) -> PackedStates:
    """Store each head of states [HV, K, V] in its dtype.

    Args:
        states: Float32 or bfloat16, as ``StatePool.export`` returns them; heads with an integer dtype must be finite.
        dtypes: One of ``DTYPES`` for all heads, or one for each head.

    Raises:
        GdnError: A dtype is unknown, their number is not that of the heads, or a number is not finite.
    """
    if states.ndim != 3:
        raise bad("states", f"of shape {list(states.shape)}", "be [HV, K, V]")
    each = (dtypes,) * len(states) if isinstance(dtypes, str) else tuple(dtypes)
    for dtype in each:
        if dtype not in DTYPES:
            raise bad("dtypes", repr(dtype), f"be one of {', '.join(DTYPES)}, or one of them a head")
    if len(each) != len(states):
        raise bad("dtypes", f"of {len(each)} heads", f"name one dtype for each of the {len(states)} heads of states")
    parts, scales = {}, {}
    for dtype in DTYPES:
        heads = np.flatnonzero(np.array(each) == dtype)
        if not len(heads):
            continue
        some = states[heads].astype(np.float32)
        if dtype in _LARGEST:
            if not np.isfinite(some).all():
                raise bad("states", "not finite", f"be finite where a head is kept as {dtype}")
            scale = np.abs(some).max(axis=_SHARED[dtype], keepdims=True, initial=0) / np.float32(_LARGEST[dtype])
            # A head of zeros keeps its zeros; a scale below the least normal number would lose what it divides.
            scale = np.maximum(scale, np.finfo(np.float32).tiny)
            parts[dtype] = np.clip(np.rint(some / scale), -_LARGEST[dtype], _LARGEST[dtype]).astype(dtype)
            scales[dtype] = scale
        else:
            parts[dtype] = some.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    return PackedStates(each, parts, scales)


def unpack(packed: PackedStates) -> np.ndarray:
    """Return the states in float32 [HV, K, V]."""
    shape = next((a.shape[1:] for a in packed.parts.values()), (0, 0))
    states = np.zeros((len(packed.dtypes), *shape), np.float32)
    for dtype, part in packed.parts.items():
        some = part.astype(np.float32)
        if dtype in packed.scales:
            some = some * packed.scales[dtype]
        states[np.array(packed.dtypes) == dtype] = some
    return states


def choose_dtypes(errors: Mapping[str, Sequence[float]], within: float, among: Sequence[str] = DTYPES) -> list[str]:
    """Choose for each head the smallest dtype whose error is within the limit, or float32 if there is none.

    Args:
        errors: For each dtype, the relative error of each head's outputs, as ``portable-gdn doctor --states`` measures
            it.
        within: The largest error allowed, relative to the head's outputs.
        among: The dtypes to choose from.

    Raises:
        GdnError: ``within`` is not a positive number, or ``errors`` lacks a dtype.
    """
    if not isinstance(within, (int, float)) or isinstance(within, bool) or not within > 0:
        raise bad("within", repr(within), "be a positive number, the error relative to a head's outputs")
    for dtype in among:
        if dtype not in DTYPES:
            raise bad("among", repr(dtype), f"hold only {', '.join(DTYPES)}")
        if dtype not in errors:
            raise bad("errors", f"without {dtype}", "hold the errors of every dtype to choose from")
    count = {len(of) for of in errors.values()}
    if len(count) > 1:
        raise bad("errors", f"of {sorted(count)} heads", "have one error a head for every dtype")
    order = sorted(among, key=lambda dtype: (BYTES[dtype], DTYPES.index(dtype)))
    heads = range(count.pop() if count else 0)
    return [next((dtype for dtype in order if errors[dtype][head] <= within), "float32") for head in heads]
