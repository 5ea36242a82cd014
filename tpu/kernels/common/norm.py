"""A mixer's output norm and gate, and their cotangents, on values in registers: a head's tokens [rows, V] at a time.

The formulas are those of ``spec.norm``, with as few operations an element as they need. With the root of V in the
weight no sum is divided, and with t = tanh(z / 2) the gate and its slope need no other transcendental. Both sums over a
head's channels begin from o, so that neither waits for the other: a sum over lanes takes long to come.

    n = o r, r = rsqrt(sum o^2 + V eps); y = n w sqrt(V) a;    silu a = z (1 + t) / 2, 2 a' = 1 + t + a (1 - t)
    do = r dn - o r^3 sum o dn, dn = dy a w sqrt(V)            sigmoid a = (1 + t) / 2, 2 a' = a (1 - t)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ....spec.problem import NormKind

__all__ = ["NormGradients", "norm_gradients", "normed_output"]

Array = Any


class NormGradients(NamedTuple):
    """Cotangents of o and of z, None without z, and what sums over tokens and heads to that of the weight / sqrt(V),
    all [rows, V]."""

    o: Array
    z: Array | None
    weight: Array


def _sum(a: Array) -> Array:
    return jnp.sum(a, axis=-1, keepdims=True)


def _normed(kind: NormKind, o: Array) -> tuple[Array, Array]:
    """n and r."""
    r = lax.rsqrt(_sum(o * o) + kind.eps * o.shape[-1])
    return o * r, r


def _tanh_of_half(z: Array) -> tuple[Array, Array]:
    """z / 2 and t."""
    half = 0.5 * z
    return half, jnp.tanh(half)


def normed_output(kind: NormKind, o: Array, weight: Array, z: Array | None) -> Array:
    """A head's output [rows, V] through the norm; weight [1, V], z [rows, V] or None, all float32."""
    n, _ = _normed(kind, o)
    root = o.shape[-1] ** 0.5
    if z is None:
        return n * (weight * root)
    half, t = _tanh_of_half(z)
    return (
        n * (weight * root) * (half + half * t)
        if kind.activation == "silu"
        else n * (weight * (0.5 * root)) * (1.0 + t)
    )


def norm_gradients(kind: NormKind, o: Array, weight: Array, z: Array | None, dy: Array) -> NormGradients:
    """The cotangents of a head, from that of the normed output dy [rows, V]; the rest as in ``normed_output``."""
    n, r = _normed(kind, o)
    root = o.shape[-1] ** 0.5
    scaled = weight * root
    d, dz = dy, None
    if z is not None:
        half, t = _tanh_of_half(z)
        more, less = 1.0 + t, 1.0 - t
        a = half * more if kind.activation == "silu" else 0.5 * more
        twice = more + a * less if kind.activation == "silu" else a * less
        d = dy * a
        dz = dy * (n * (0.5 * scaled)) * twice
    dn = d * scaled
    return NormGradients(r * dn - o * (r * r * r * _sum(o * dn)), dz, d * n)
