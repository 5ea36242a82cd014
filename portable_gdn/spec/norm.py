"""The output norm of a mixer, an RMS norm over each value head with a weight and a gate, for any array namespace.

    y = n weight activation(z),  n = o / sqrt(mean o^2 + eps)

The mean runs over the V channels of a head, and the activation is silu or sigmoid. An output of 0 stays 0 and has a
finite derivative.
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
    """The RMS norm of each value head's output, times a weight, times the activated gate ``z`` of the call.

    Args:
        weight: the factor itself, [V], in any float dtype; None means ones. Add 1 to the weight of a checkpoint that
            stores it minus 1.
        eps: added to the mean of squares inside the root; must be above 0.
        activation: the activation of z, "silu" or "sigmoid"; None is a norm without a gate, whose call takes no z.
    """

    weight: Any
    eps: float = 1e-6
    activation: str | None = "silu"


def rms_normed(xp: Namespace, o: Array, eps: float) -> tuple[Array, Array]:
    """Return n = o r [..., V] and r = 1 / sqrt(mean o^2 + eps) [..., 1]."""
    r = 1 / xp.sqrt(xp.mean(o * o, axis=-1, keepdims=True) + eps)
    return o * r, r


def gated_norm(
    xp: Namespace, o: Array, weight: Array | None, z: Array | None, eps: float, activation: str | None
) -> Array:
    """Compute y [..., V] from o and z [..., V] and weight [V], which share a real dtype; z is None without a gate."""
    y, _ = rms_normed(xp, o, eps)
    y = y if weight is None else y * weight
    if z is None:
        return y
    s = sigmoid(xp, z)
    return y * (z * s if activation == "silu" else s)


def gated_norm_vjp(
    xp: Namespace, o: Array, weight: Array | None, z: Array | None, eps: float, activation: str | None, dy: Array
) -> tuple[Array, Array, Array | None]:
    """Compute the cotangents of o, of weight and of z, all [..., V], from that of y.

    The cotangent of weight is not yet summed over all axes but that of the channels. That of z is None without a gate.
    """
    n, r = rms_normed(xp, o, eps)
    scaled = n if weight is None else n * weight
    dz, d = None, dy
    if z is not None:
        s = sigmoid(xp, z)
        slope = s * (1 + z * (1 - s)) if activation == "silu" else s * (1 - s)
        dz, d = dy * scaled * slope, dy * (z * s if activation == "silu" else s)
    dn = d if weight is None else d * weight
    return r * (dn - n * xp.mean(n * dn, axis=-1, keepdims=True)), d * n, dz
