"""The sizes of what an output norm's results are sums of, before these cancel.

The oracle bounds by them what a float32 computation may be off by. An output that is small beside its summands is made
large by the norm, and its error with it.
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
    """Sizes by element: those of y, and, given a cotangent of y, those of the cotangents of o, of the weight before its
    sum over tokens and heads, and of z."""

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
    """Sizes of the summands of ``gated_norm`` and of its cotangents.

    Args:
        o, o_size: the rule's output [..., V], and the size of its own summands.
        weight: [V] or None. z: [..., V] or None.
        kind: of the norm.
        dy: the cotangent of y, or None.
    """

    def mean(a: np.ndarray) -> np.ndarray:
        return a.mean(axis=-1, keepdims=True)

    n, r = rms_normed(xp, o, kind.eps)
    n = np.abs(n)
    relative = r * mean(n * o_size)  # of r
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
