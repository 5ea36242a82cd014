"""A mixer's output norm and gate, and their cotangents, on values in registers: a head's tokens [rows, V] at a time.

The formulas are those of ``spec.norm``; written anew is what a TPU does differently: silu is y + y tanh(y) with
y = z / 2, the sigmoid half of 1 + tanh(y), and both sums over a head's channels begin from o, so that neither waits for
the other:

    r = rsqrt(mean o^2 + eps);  n = o r;  dn = dy activation(z) weight;  do = r dn - o r^3 mean(o dn)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ....spec.problem import NormKind

__all__ = ["NormGradients", "norm_gradients", "normed_output"]

Array = Any


class NormGradients(NamedTuple):
    """Cotangents of o and of z, and that of the weight before its sum over tokens [rows, V]; z's is None without z."""

    o: Array
    z: Array | None
    weight: Array


def _mean(a: Array) -> Array:
    return jnp.sum(a, axis=-1, keepdims=True) * (1.0 / a.shape[-1])


def _activated(z: Array, activation: str | None) -> tuple[Array, Array]:
    """silu or the sigmoid of z, and the sigmoid."""
    half = 0.5 * z
    t = jnp.tanh(half)
    s = 0.5 + 0.5 * t
    return (half + half * t if activation == "silu" else s), s


def normed_output(kind: NormKind, o: Array, weight: Array, z: Array | None) -> Array:
    """A head's output [rows, V] through the norm; weight [1, V], z [rows, V] or None, all float32."""
    y = o * lax.rsqrt(_mean(o * o) + kind.eps) * weight
    return y if z is None else y * _activated(z, kind.activation)[0]


def norm_gradients(kind: NormKind, o: Array, weight: Array, z: Array | None, dy: Array) -> NormGradients:
    """The cotangents of a head, from that of the normed output dy [rows, V]; the rest as of ``normed_output``."""
    r = lax.rsqrt(_mean(o * o) + kind.eps)
    n = o * r
    d, dz = dy, None
    if z is not None:
        a, s = _activated(z, kind.activation)
        d = dy * a
        slope = s + a * (1.0 - s) if kind.activation == "silu" else a * (1.0 - a)
        dz = dy * (n * weight) * slope
    dn = d * weight
    return NormGradients(r * dn - o * (r * r * r * _mean(o * dn)), dz, d * n)
