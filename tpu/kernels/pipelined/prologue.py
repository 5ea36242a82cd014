"""What lies before the rule, inside the kernel: the short convolution, the norm and the gates, on values in VMEM.

The formulas are those of ``spec.conv`` and ``spec.gates``; written anew is what a TPU does differently: a tap reads its
rows from a window in VMEM, where a load may begin at any row, and silu is y + y tanh(y) with y = x / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ....spec.gates import L2_EPS, activate_gate
from .geometry import Inside

__all__ = ["HISTORY", "channel_decay", "convolved", "log_decay", "normalised", "tap_rows"]

Array = Any

#: Rows of a window before its first token: a tile, and at least what the widest convolution looks back.
HISTORY = 8


def tap_rows(width: int) -> int:
    """Rows of the array of taps: the taps, oldest first, then the bias; whole tiles. Half of each, for silu."""
    return -(-(width + 1) // 8) * 8


def convolved(inside: Inside, window: Any, taps: Any, first: int, rows: int, head: int) -> Array:
    """Tokens from ``first`` on of a head of a window [heads, HISTORY + tokens, 128] float32, through the convolution.

    Rows of one head lie behind each other in such a window, so that eight from any row on are one load.
    """
    lanes = slice(head * window.shape[-1], (head + 1) * window.shape[-1])
    start = HISTORY + first - (inside.width - 1)
    terms = [window[head, start + j : start + j + rows] * taps[j : j + 1, lanes] for j in range(inside.width)]
    y = sum(terms[1:], terms[0])
    if inside.bias:
        y = y + taps[inside.width : inside.width + 1, lanes]
    return y + y * jnp.tanh(y) if inside.silu else y


def normalised(x: Array) -> Array:
    """x / sqrt(sum x^2 + 1e-6) over the lanes, x float32."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def log_decay(inside: Inside, raw: Array, parameters: Sequence[Array]) -> Array:
    """The gate's log decay of a raw projection [rows, tokens]; parameters A_log and dt_bias [rows, 1]."""
    A_log, dt_bias = parameters
    return activate_gate(jnp, raw, A_log, dt_bias, inside.lower_bound)


def channel_decay(inside: Inside, raw: Array, rate: Array, bias: Array) -> Array:
    """The log decay by channel: raw [rows, channels]; rate, which is exp(A_log), and dt_bias [1, channels].

    Without derivatives, so that one evaluation will do: a product with a rate that has overflowed is a reset as it is,
    and 0 where the activation is.
    """
    x = raw + bias
    if inside.lower_bound is None:
        soft = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        return jnp.where(soft == 0, 0.0, -rate * soft)
    z = jnp.where(x == 0, 0.0, rate * x)
    small = jnp.exp(-jnp.abs(z))
    return inside.lower_bound * jnp.where(z >= 0, 1.0, small) / (1.0 + small)
