"""The stages as functions of values in VMEM, for the kernel and its probes.

Shapes as in ``spec.stages``: leading dimensions (key heads, value heads a key head), then [C, ...] of one chunk. What
is written here anew is what Mosaic does not lower from the specification's text (cumulative sums, transposes of
columns, blocks of a few rows, decays of groups); ``wy``, ``delta`` and ``output`` are the specification's own. A kernel
takes this module, or another with the same names, as its argument. Scores by channel are in ``channels``.

Products are ``dot.KernelProduct``: they multiply by a transpose without forming it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ....spec import stages as spec
from ....spec.stages import Decays
from ..common.products import KernelProduct
from ..common.registers import iota, square_indices
from ..common.tiles import SUBLANES
from . import channel_scores as channels_of

__all__ = ["decay", "delta", "inverse", "output", "scores", "state", "wy"]  # those of ``spec.stages.STAGES``

Array = Any


def decay(g: Array) -> Decays:
    """Sum of the log decays since the last reset, and the number of resets so far, both inclusive.

    Args:
        g: [C, n], a column a value head.

    Returns:
        G [C, n] and count [C, n] as floats. The sums are those of ``spec.stages.decay``, bit for bit: to each right
        block of 1, 2, 4, ... rows the last sum of the left one, unless a reset lies between. A gate of 0 changes none.
    """
    reset = g < spec.RESET
    row = iota(g.shape, 0)
    G, count, size = jnp.where(reset, 0.0, g), jnp.where(reset, 1.0, 0.0), 1
    while size < min(SUBLANES, g.shape[0]):
        last, last_count = _spread(G, row, size), _spread(count, row, size)
        G, count = G + jnp.where(count == 0, last, 0.0), count + last_count  # the counts are each block's own so far
        size *= 2
    sums = [(G[i : i + size], count[i : i + size]) for i in range(0, g.shape[0], size)]
    step = 1
    while step < len(sums):
        for i in range(len(sums)):
            if i & step:
                (x, n), (left, left_n) = sums[i], sums[(i & -step) - 1]
                sums[i] = x + jnp.where(n == 0, left[-1:], 0.0), n + left_n[-1:]
        step *= 2
    return Decays(jnp.concatenate([x for x, _ in sums]), jnp.concatenate([n for _, n in sums]))


def _spread(x: Array, row: Array, size: int) -> Array:
    """At each row of a right block of ``size`` rows the last row of the left block beside it; elsewhere 0."""
    x = pltpu.roll(jnp.where(row & (2 * size - 1) == size - 1, x, 0.0), 1, 0)
    step = 1
    while step < size:
        x = x + pltpu.roll(x, step, 0)
        step *= 2
    return x


def across_lanes(x: Array) -> Array:
    """A column [.., C, 1] as a row [.., 1, C], by a sum over the diagonal: exact, and lowered everywhere."""
    row, column = square_indices(x.shape[-2])
    return jnp.sum(jnp.where(row == column, x, 0.0), axis=-2, keepdims=True)


def pair_decay(G: Array, count: Array) -> Array:
    """exp(G_i - G_j) for i >= j with no reset between them, else 0: [.., C, C] from columns [.., C, 1]."""
    row, column = square_indices(G.shape[-2])
    keep = (row >= column) & (count == across_lanes(count))
    return jnp.exp(jnp.where(keep, G - across_lanes(G), -jnp.inf))  # masked before exp: 0 * inf is NaN


def scores(
    mm: KernelProduct, q: Array, k: Array, b: Array | None, decays: Decays, scale: float
) -> tuple[Array | None, Array]:
    """Decayed scores Akk (strictly lower, with b; None without b) and Aqk (lower, with scale), [.., C, C] each.

    Args:
        q, k: [.., C, K]; b: [.., C, 1 or K] or None; decays: [.., C, n] each.
    """
    G, count = decays
    row, column = square_indices(k.shape[-2])
    n, channels = G.shape[-1], k.shape[-1]
    e = None if b is None else b * k
    if n == 1:
        D = pair_decay(G, count)
        Aqk = mm.right_transposed(q, k, "q", "k") * D
        if e is None:
            return None, scale * Aqk
        head = b is not None and b.shape[-1] == 1  # then k keeps what it is, exact in bfloat16
        Akk = (b * mm.right_transposed(k, k, "k", "k") if head else mm.right_transposed(e, k, "k", "k")) * D
    elif n < channels:
        D = [pair_decay(G[..., i : i + 1], count[..., i : i + 1]) for i in range(n)]
        Aqk = channels_of.by_group(mm, q, k, "q", D)
        Akk = None if e is None else channels_of.by_group(mm, e, k, "k", D)
    else:
        rows = [q] if e is None else [q, e]
        shape = (*G.shape[:-2], *k.shape[-2:])
        pairs = channels_of.by_channel(mm, [jnp.broadcast_to(x, shape) for x in rows], ["q", "k"], k, decays)
        Aqk = jnp.where(row == column, jnp.sum(q * k, axis=-1, keepdims=True), pairs[0])
        Akk = None if e is None else pairs[1]
    return None if Akk is None else jnp.where(row > column, Akk, 0.0), scale * Aqk


def inverse(mm: KernelProduct, Akk: Array) -> Array:
    """T = (I + Akk)^-1 [.., C, C], by the ladder of ``spec.stages.inverse`` on whole tiles.

    With X the inverse of the diagonal blocks of s rows and L the blocks of Akk that join pairs of them, the inverse of
    the blocks of 2 s rows is X - X L X. All else is zeros, so these are the sums of the blocks themselves; powers of
    Akk never appear.
    """
    row, column = square_indices(Akk.shape[-1])
    apart = row ^ column  # in [s, 2 s) where row and column lie in the two halves of one block of 2 s
    X = jnp.where(row == column, 1.0, jnp.where(apart == 1, -Akk, 0.0))
    size = 2
    while size < Akk.shape[-1]:
        L = jnp.where((apart >= size) & (apart < 2 * size), Akk, 0.0)
        X = X - mm(mm(X, L, "T", "A"), X, "T", "T")
        size *= 2
    return X


def wy(
    mm: KernelProduct,
    T: Array | None,
    k: Array,
    v: Array,
    b: Array | None,
    w: Array | None,
    decays: Decays,
) -> tuple[Array, Array | None]:
    """U [.., C, V] and W [.., C, K], which the kernel never forms: its own T applied to their right sides."""
    return spec.wy(spec.Algebra(jnp, mm), T, k, v, b, w, _wide(k, decays))


def delta(
    mm: KernelProduct,
    T: Array | None,
    k: Array,
    v: Array,
    b: Array | None,
    w: Array | None,
    decays: Decays,
    S: Array,
) -> Array:
    """Vn = T (w * v - (b * k * exp G) S) [.., C, V], with S [.., K, V] the state at the chunk's start."""
    return spec.delta_direct(spec.Algebra(jnp, mm), T, k, v, b, w, _wide(k, decays), S)


def output(mm: KernelProduct, q: Array, Aqk: Array, Vn: Array, decays: Decays, S: Array, scale: float) -> Array:
    """o = scale (q * exp G) S + Aqk Vn [.., C, V]."""
    return spec.output(spec.Algebra(jnp, mm), q, Aqk, Vn, _wide(q, decays), S, scale)


def state(mm: KernelProduct, k: Array, Vn: Array, decays: Decays, S: Array) -> Array:
    """The state after the chunk, [.., K, V].

    With one decay per head Vn is scaled instead of k, which then enters as exact as it came.
    """
    decays = _wide(k, decays)
    kept, to_end = spec.across(jnp, decays), spec.to_end(jnp, decays)
    if decays.sum.shape[-1] == 1:
        return kept * S + mm.left_transposed(k, to_end * Vn, "k", "Vn")
    return down_rows(kept) * S + mm.left_transposed(to_end * k, Vn, "k", "Vn")


def _wide(k: Array, decays: Decays) -> Decays:
    """Decays of groups for every channel of k."""
    return Decays(*(channels_of.wide(a, k.shape[-1]) for a in decays))


def down_rows(x: Array) -> Array:
    """A row [.., 1, K] as a column [.., K, 1]; the inverse of ``across_lanes``."""
    row, column = square_indices(x.shape[-1])
    return jnp.sum(jnp.where(row == column, x, 0.0), axis=-1, keepdims=True)
