"""The sizes of the summands that make up the results of an output norm, before they cancel.

The oracle uses them to bound the error that a float32 computation may have. If an output is small compared with its
summands, the norm enlarges it, and its error with it.
"""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from .gates import sigmoid
from .norm import rms_normed
from .problem import NormKind

__all__ = ["NormSizes", "norm_sizes"]


class NormSizes(NamedTuple):
    """The sizes of the summands of each element; the cotangents have sizes only if a cotangent of y was given.

    Attributes:
        y: those of the output.
        dO: those of the cotangent of o.
        weight: those of the weight's cotangent, before it is summed over tokens and heads.
        z: those of the cotangent of z.
    """

    y: np.ndarray
    dO: np.ndarray | None = None
    weight: np.ndarray | None = None
    z: np.ndarray | None = None


def norm_sizes(
    o: np.ndarray,
    o_size: np.ndarray,
    weight: np.ndarray | None,
    z: np.ndarray | None,
    kind: NormKind,
    dy: np.ndarray | None,
) -> NormSizes:
    """Compute the sizes of the summands of ``gated_norm`` and of its cotangents.

    Args:
        o: the output of the rule, [..., V].
        o_size: the sizes of that output's summands, [..., V].
        weight: [V] or None.
        z: [..., V] or None.
        kind: the kind of norm.
        dy: the cotangent of y, or None.
    """

    def mean(a: np.ndarray) -> np.ndarray:
        return a.mean(axis=-1, keepdims=True)

    n, r = rms_normed(xp, o, kind.eps)
    n = np.abs(n)
    relative = r * mean(n * o_size)  # the relative size for r
    of_n = r * o_size + n * relative
    gain = np.ones_like(o) if weight is None else np.abs(np.broadcast_to(weight, o.shape))
    activated = slope = np.ones_like(o)
    if z is not None:
        s = sigmoid(xp, z)
        silu = kind.activation == "silu"
        activated = np.abs(z) * s if silu else s
        slope = s * (1 + np.abs(z) * (1 - s)) if silu else s * (1 - s)
    y = gain * activated * of_n
    if dy is None:
        return NormSizes(y)
    d = np.abs(dy) * activated
    dn = d * gain
    projected = mean(n * dn)
    dO = r * ((dn + n * projected) * (1 + relative) + of_n * projected + n * mean(of_n * dn))
    return NormSizes(y, dO, d * (of_n + n), None if z is None else np.abs(dy) * gain * slope * (of_n + n))
