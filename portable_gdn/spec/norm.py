"""The output norm of a mixer, RMS norm over a value head with its weight and gate, for any array namespace.

    y = n weight activation(z),  n = o / sqrt(mean o^2 + eps)        silu or sigmoid, over the V channels of a head

A token whose output is 0 stays 0 and has a finite derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import suggesting
from .gates import sigmoid
from .stages import Array, Namespace

__all__ = ["ACTIVATIONS", "GatedRMSNorm", "gated_norm", "gated_norm_vjp", "rms_normed"]

ACTIVATIONS = ("silu", "sigmoid")


@suggesting
@dataclass(frozen=True)
class GatedRMSNorm:
    """RMS norm of each value head's output, times its weight, times the activated gate ``z`` of the call.

    Args:
        weight: [V], any float dtype, as it multiplies (a checkpoint that keeps it less 1 must be given 1 more); None is
            ones.
        eps: added to the mean of squares, inside the root; above 0.
        activation: "silu" or "sigmoid" of z, or None for a norm without a gate, to whose call no z is given.
    """

    weight: Any
    eps: float = 1e-6
    activation: str | None = "silu"


def rms_normed(xp: Namespace, o: Array, eps: float) -> tuple[Array, Array]:
    """n = o r [..., V] and r = 1 / sqrt(mean o^2 + eps) [..., 1]."""
    r = 1 / xp.sqrt(xp.mean(o * o, axis=-1, keepdims=True) + eps)
    return o * r, r


def gated_norm(
    xp: Namespace, o: Array, weight: Array | None, z: Array | None, eps: float, activation: str | None
) -> Array:
    """y [..., V] of o and z [..., V] and weight [V], in their common real dtype; z None where there is no gate."""
    y, _ = rms_normed(xp, o, eps)
    y = y if weight is None else y * weight
    if z is None:
        return y
    s = sigmoid(xp, z)
    return y * (z * s if activation == "silu" else s)


def gated_norm_vjp(
    xp: Namespace, o: Array, weight: Array | None, z: Array | None, eps: float, activation: str | None, dy: Array
) -> tuple[Array, Array, Array | None]:
    """Cotangents of o, of weight before its sum over all but channels, and of z, all [..., V], from that of y."""
    n, r = rms_normed(xp, o, eps)
    scaled = n if weight is None else n * weight
    dz, d = None, dy
    if z is not None:
        s = sigmoid(xp, z)
        slope = s * (1 + z * (1 - s)) if activation == "silu" else s * (1 - s)
        dz, d = dy * scaled * slope, dy * (z * s if activation == "silu" else s)
    dn = d if weight is None else d * weight
    return r * (dn - n * xp.mean(n * dn, axis=-1, keepdims=True)), d * n, dz
