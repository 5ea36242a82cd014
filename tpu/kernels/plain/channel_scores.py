"""Scores whose decays differ by channel, on values in VMEM: groups of channels, or every channel by itself.

Decays by channel: the hierarchy of ``spec.stages.channel_scores``, each level on whole tiles. At a level the chunk is
cut in blocks of s rows, and the left of two neighbours holds keys, the right one rows; the reference is the last row of
the left block. So one array [C, K] holds both kinds of factors, and one product of whole tiles all corners of the
level; what lies outside of them is masked. No exponent is positive, and none depends on a later token than its row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ....spec.stages import Decays
from ..common.products import KernelProduct
from ..common.registers import divided, iota, square_indices
from ..common.tiles import SUBLANES

__all__ = ["by_channel", "by_group", "wide"]

Array = Any


def wide(x: Array, channels: int) -> Array:
    """A factor of groups [.., n] over the channels of each [.., channels]; n = 1 and n = channels stay."""
    n = x.shape[-1]
    if n in (1, channels):
        return x
    group = divided(iota((*x.shape[:-1], channels), x.ndim - 1), channels // n)
    out = jnp.broadcast_to(x[..., :1], group.shape)
    for i in range(1, n):
        out = jnp.where(group == i, x[..., i : i + 1], out)
    return out


def by_group(mm: KernelProduct, x: Array, k: Array, name: str, D: list[Array]) -> Array:
    """sum_n D_n * (x k^T over the channels of group n): [.., C, C], with D_n [.., C, C]."""
    channels = k.shape[-1]
    group = divided(iota(k.shape, k.ndim - 1), channels // len(D))
    return sum(d * mm.right_transposed(x, jnp.where(group == n, k, 0.0), name, "k") for n, d in enumerate(D))


def by_channel(mm: KernelProduct, rows: list[Array], names: list[str], k: Array, decays: Decays) -> list[Array]:
    """For each x of rows [.., C, K]: sum_d x_i k_j exp(G_i - G_j) for i > j, else 0. [.., C, C] each."""
    C = k.shape[-2]
    row, column = square_indices(C)
    apart = jnp.where(row > column, row ^ column, 0)  # in [s, 2 s) where the pair is in a corner of the level of s
    out = [jnp.zeros((), jnp.float32)] * len(rows)
    size = 1
    while size < C:
        factor = _factors(*decays, size)
        keys = factor * k
        corner = (apart >= size) & (apart < 2 * size)
        for i, x in enumerate(rows):
            out[i] = jnp.where(corner, mm.right_transposed(factor * x, keys, names[i], "k"), out[i])
        size *= 2
    return out


def _factors(G: Array, count: Array, size: int) -> Array:
    """The decay from each row of a left block to its last row, and from there to each row of the right block."""
    last, last_count = _last_of_left(G, size), _last_of_left(count, size)
    row = iota(G.shape, G.ndim - 2)
    exponent = jnp.where(row & size != 0, G - last, last - G)
    return jnp.exp(jnp.where(count == last_count, exponent, -jnp.inf))  # masked before exp: 0 * inf is NaN


def _last_of_left(x: Array, size: int) -> Array:
    """In every pair of neighbouring blocks of ``size`` rows the last row of the left one. [.., C, K]"""
    *lead, C, K = x.shape
    if size >= SUBLANES:
        rows = [x[..., i + size - 1 : i + size, :] for i in range(0, C, 2 * size)]
        return jnp.concatenate([jnp.broadcast_to(a, (*lead, 2 * size, K)) for a in rows], -2)
    x = jnp.reshape(x, (-1, K))
    row = iota(x.shape, 0)
    x = jnp.where(row & (2 * size - 1) == size - 1, x, 0.0)
    right, step = pltpu.roll(x, 1, 0), 1
    while step < size:
        x = x + pltpu.roll(x, x.shape[0] - step, 0)  # backwards, over the left block
        right = right + pltpu.roll(right, step, 0)
        step *= 2
    return jnp.reshape(x + right, (*lead, C, K))
