"""Decays by channel as factors: products of exp(g) over parts of a chunk, on values [C, K] float32 in VMEM.

Every factor of the rule is exp of a sum of log decays of neighbouring tokens, so a product of their exponentials, and
products of numbers in [0, 1] neither overflow nor lose digits behind a strong decay. A reset is a factor 0, and needs
no count; a gate of 0 is a factor 1, and changes nothing. In blocks of s rows (s = 1, 2, 4, ...):

    P_i  product over the block's rows up to i, i included: from the block's start into row i
    Q_i  product over the block's rows after i: from row i to the block's end

A row of the right one of two neighbouring blocks sees a key of the left one through P_i Q_j, which is the hierarchy of
``spec.stages.channel_scores`` with the last row of the left block as the reference.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["doubled", "joined", "split"]

Array = Any

_SUBLANES = 8  # rows of a float32 tile


def doubled(P: Array, Q: Array, size: int) -> tuple[Array, Array]:
    """P and Q of blocks of 2 size rows from those of blocks of ``size``.

    In a pair of blocks the right one's P gets the left one's whole product, and the left one's Q the right one's; both
    are the last row of the other block's P.
    """
    C, K = P.shape
    if size < _SUBLANES:
        tiles = (C // _SUBLANES, _SUBLANES, K)
        row = lax.broadcasted_iota(jnp.int32, tiles, 1)
        other = jnp.take_along_axis(jnp.reshape(P, tiles), (row ^ size) | (size - 1), axis=1)
        right = row & size != 0
        P = jnp.reshape(P, tiles) * jnp.where(right, other, 1.0)
        Q = jnp.reshape(Q, tiles) * jnp.where(right, 1.0, other)
        return jnp.reshape(P, (C, K)), jnp.reshape(Q, (C, K))
    (P_left, P_right), (Q_left, Q_right) = split(P, size), split(Q, size)
    P = joined(P_left, P_right * P_left[:, -1:])
    return P, joined(Q_left * P_right[:, -1:], Q_right)


def split(x: Array, size: int) -> tuple[Array, Array]:
    """The left and the right blocks of pairs of blocks of ``size`` rows, [C / 2 size, size, K] each."""
    x = jnp.reshape(x, (x.shape[0] // (2 * size), 2, size, x.shape[1]))
    return x[:, 0], x[:, 1]


def joined(left: Array, right: Array) -> Array:
    """The inverse of ``split``: [C, K]."""
    return jnp.reshape(jnp.stack([left, right], 1), (-1, left.shape[-1]))
