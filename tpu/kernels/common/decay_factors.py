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

from .registers import iota
from .tiles import SUBLANES

__all__ = ["doubled", "exchanged", "joined", "rows_of_tiles", "split", "tiles"]

Array = Any


def doubled(P: Array, Q: Array, size: int, gathers: bool = True) -> tuple[Array, Array]:
    """P and Q of blocks of 2 size rows from those of blocks of ``size``.

    In a pair of blocks the right one's P gets the left one's whole product, and the left one's Q the right one's. A
    block's whole product is the last row of its P, and P Q in every row. gathers: as for ``exchanged``.
    """
    if size < SUBLANES:
        row = rows_of_tiles(P)
        if gathers:
            other = jnp.take_along_axis(tiles(P), (row ^ size) | (size - 1), axis=1)
        else:
            other = exchanged(tiles(P * Q), size, gathers)
        right = row & size != 0
        P = tiles(P) * jnp.where(right, other, 1.0)
        Q = tiles(Q) * jnp.where(right, 1.0, other)
        return jnp.reshape(P, (-1, P.shape[-1])), jnp.reshape(Q, (-1, Q.shape[-1]))
    (P_left, P_right), (Q_left, Q_right) = split(P, size), split(Q, size)
    P = joined(P_left, P_right * P_left[:, -1:])
    return P, joined(Q_left * P_right[:, -1:], Q_right)


def tiles(x: Array) -> Array:
    """Rows [C, K] by tiles of eight [C / 8, 8, K]."""
    return jnp.reshape(x, (-1, SUBLANES, x.shape[-1]))


def rows_of_tiles(x: Array) -> Array:
    """Each row's place in its tile, of x [C, K] or [C / 8, 8, K]: int32 [C / 8, 8, K]."""
    return iota((x.size // (SUBLANES * x.shape[-1]), SUBLANES, x.shape[-1]), 1)


def exchanged(x: Array, size: int, gathers: bool) -> Array:
    """Neighbouring blocks of ``size`` rows in each other's place, in tiles [C / 8, 8, K].

    gathers: whether the chip gathers sublanes; else it takes two turns and a choice.
    """
    if gathers:
        return jnp.take_along_axis(x, rows_of_tiles(x) ^ size, axis=1)
    turned = jnp.roll(x, size, 1)
    if 2 * size == SUBLANES:
        return turned
    return jnp.where(rows_of_tiles(x) & size != 0, turned, jnp.roll(x, -size, 1))


def split(x: Array, size: int) -> tuple[Array, Array]:
    """The left and the right blocks of pairs of blocks of ``size`` rows, [C / 2 size, size, K] each."""
    x = jnp.reshape(x, (x.shape[0] // (2 * size), 2, size, x.shape[1]))
    return x[:, 0], x[:, 1]


def joined(left: Array, right: Array) -> Array:
    """The inverse of ``split``: [C, K]."""
    return jnp.reshape(jnp.stack([left, right], 1), (-1, left.shape[-1]))
