"""Gate activations and the l2 norm, in the real dtype of the inputs (usually float32), for any array namespace.

softplus:  g = -exp(A_log) softplus(x + dt_bias)                  Gated DeltaNet, Kimi-Linear
bounded:   g = lower_bound sigmoid(exp(A_log) (x + dt_bias))      KDA with a "safe gate": a different activation, with
                                                                  which the model was trained, not a clamp of the first
Neither the value nor the derivative becomes NaN if a factor overflows: at a reset, and where the activation is
saturated, the derivative is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import suggesting
from .stages import RESET, Array, Namespace

__all__ = ["L2_EPS", "BoundedGate", "SoftplusGate", "activate_gate", "gate_vjp", "l2norm", "l2norm_vjp", "softplus"]

L2_EPS = 1e-6  # inside the root, added to the sum of squares


@suggesting
@dataclass(frozen=True)
class SoftplusGate:
    """The gate g = -exp(A_log) softplus(x + dt_bias), where x is the raw projection given as ``g``.

    Args:
        A_log: [HV], in any float dtype.
        dt_bias: [HV], or [HV, n] or [HV * n] for a gate with n decays per value head; None means 0.
    """

    A_log: Any
    dt_bias: Any = None


@suggesting
@dataclass(frozen=True)
class BoundedGate:
    """The gate g = lower_bound sigmoid(exp(A_log) (x + dt_bias)), where x is the raw projection given as ``g``.

    Args:
        A_log: [HV], in any float dtype; None means 0.
        dt_bias: [HV], or [HV, n] or [HV * n] for a gate with n decays per value head; None means 0.
        lower_bound: the strongest log decay that a token can have, in [-5, 0).
    """

    A_log: Any = None
    dt_bias: Any = None
    lower_bound: float = -5.0


def softplus(xp: Namespace, x: Array) -> Array:
    """Compute log(1 + exp x) without overflow and without losing small values."""
    positive = xp.where(x > 0, x, xp.zeros_like(x))
    return positive + xp.log1p(xp.exp(-xp.abs(x)))


def sigmoid(xp: Namespace, x: Array) -> Array:
    """Compute 1 / (1 + exp -x), using the form in which exp does not overflow."""
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small))


def activate_gate(
    xp: Namespace, x: Array, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None
) -> Array:
    """Compute the log decay from a raw projection x [..., n], against which A_log and dt_bias broadcast.

    If ``lower_bound`` is None, this is the softplus gate, which returns -inf at resets; otherwise the bounded gate.
    """
    x = x if dt_bias is None else x + dt_bias
    A = xp.zeros_like(x) if A_log is None else xp.zeros_like(x) + A_log
    zero = xp.zeros_like(x)
    if lower_bound is None:
        # Computed twice: first to find where the gate is a reset or exactly 0, then with harmless operands there.
        soft = softplus(xp, x)
        off = soft == 0
        reset = -xp.exp(xp.where(off, zero, A)) * soft < RESET
        fixed = off | reset
        g = -xp.exp(xp.where(fixed, zero, A)) * softplus(xp, xp.where(fixed, zero, x))
        return xp.where(reset, -xp.inf, xp.where(off, zero, g))
    slope = xp.exp(xp.where(x == 0, zero, A))
    saturated = xp.abs(slope * x) > -RESET
    z = xp.exp(xp.where(saturated | (x == 0), zero, A)) * xp.where(saturated, zero, x)
    g = lower_bound * sigmoid(xp, z)
    return xp.where(saturated, xp.where(x > 0, zero + lower_bound, zero), g)


def gate_vjp(
    xp: Namespace, x: Array, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None, dg: Array
) -> tuple[Array, Array]:
    """Compute the cotangents of a gate's inputs from that of the log decay, ``dg``.

    Returns:
        The cotangent of x, which is also that of dt_bias before it is summed; and the cotangent of A_log before it is
        summed. Both have the shape of x.
    """
    g = activate_gate(xp, x, A_log, dt_bias, lower_bound)
    x = x if dt_bias is None else x + dt_bias
    A = xp.zeros_like(x) if A_log is None else xp.zeros_like(x) + A_log
    zero = xp.zeros_like(x)
    if lower_bound is None:
        fixed = (g == -xp.inf) | (softplus(xp, x) == 0)
        dx = -xp.exp(xp.where(fixed, zero, A)) * sigmoid(xp, x) * dg
        return xp.where(fixed, zero, dx), xp.where(fixed, zero, xp.where(fixed, zero, g) * dg)
    fixed = xp.abs(xp.exp(xp.where(x == 0, zero, A)) * x) > -RESET
    slope = xp.exp(xp.where(fixed | ((x == 0) & (A > 80)), zero, A))
    s = sigmoid(xp, slope * x)
    dz = xp.where(fixed, zero, lower_bound * s * (1 - s) * dg)
    return slope * dz, xp.where(fixed, zero, slope * x) * dz


def l2norm(xp: Namespace, x: Array) -> Array:
    """Compute x / sqrt(sum x^2 + 1e-6) over the last dimension; a zero row stays 0 and has a finite derivative."""
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def l2norm_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    """Compute the cotangent of x from that of y = l2norm(x)."""
    r = 1 / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)
    y = x * r
    return r * (dy - y * xp.sum(y * dy, axis=-1, keepdims=True))
