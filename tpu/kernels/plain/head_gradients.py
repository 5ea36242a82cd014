"""One chunk backwards, as a function of values in VMEM: ``spec.chunkwise.backward_chunk`` for one decay per head.

Shapes as in ``stages``. Written anew is what Mosaic does not lower from the specification's text: sums along tokens.
What scales rows is applied to results, or to the operand that is rounded anyway, so that k enters products as it came.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ....spec import stages as spec
from ..common.products import KernelProduct, exact_sums
from ..common.registers import square_indices
from .stages import across_lanes, pair_decay

__all__ = ["Gradients", "HeadOperands", "chunk_gradients"]

Array = Any


class Gradients(NamedTuple):
    """Cotangents of a chunk's operands: q, k [P, C, K] summed over the value heads; v [P, R, C, V]; g, b [P, R, C, 1];
    S [P, R, K, V], of the state at the chunk's start."""

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array
    S: Array


class HeadOperands(NamedTuple):
    """A chunk's operands: q, k [P, 1, C, K]; v [P, R, C, V]; b and decays [P, R, C, 1]; reset, the same, where g is a
    reset; S, the state at the chunk's start [P, R, K, V]."""

    q: Array
    k: Array
    v: Array
    b: Array
    decays: spec.Decays
    reset: Array
    S: Array


def _triangle(size: int, shift: int) -> Array:
    """[C, C], where the column is at most the row plus ``shift``."""
    row, column = square_indices(size)
    return column <= row + shift


def _from_here_on(x: Array) -> Array:
    """At each token the sum of a column x [.., C, 1] over that and later tokens."""
    return jnp.sum(jnp.where(_triangle(x.shape[-2], -1), 0.0, across_lanes(x)), axis=-1, keepdims=True)


def chunk_gradients(
    mm: KernelProduct,
    stages: Any,
    x: HeadOperands,
    scale: float,
    dO: Array,
    dS: Array,
) -> Gradients:
    """Cotangents from those of the output dO [P, R, C, V] and of the state after the chunk dS [P, R, K, V].

    Args:
        x: the operands.
        stages: the functions that the forward pass is made of; what it solved is solved again.
    """
    q, k, v, b, decays, reset, S = x
    D = pair_decay(*decays)
    strict = _triangle(k.shape[-2], -1)
    qk, kk = mm.right_transposed(q, k, "q", "k"), mm.right_transposed(k, k, "k", "k")
    T = stages.inverse(mm, jnp.where(strict, b * kk * D, 0.0))
    Vn = stages.delta(mm, T, k, v, b, b, decays, S)
    begin, end, kept = (f(jnp, decays) for f in (spec.from_start, spec.to_end, spec.across))

    dVn = mm.left_transposed(scale * qk * D, dO, "Aqk", "dO") + end * mm(k, dS, "k", "dS")
    X = mm.left_transposed(T, dVn, "T", "dVn")
    dAqk = scale * mm.right_transposed(dO, Vn, "dO", "Vn") * D
    dAkk = jnp.where(strict, -mm.right_transposed(X, Vn, "X", "Vn") * D, 0.0)

    dq_state = scale * begin * mm.right_transposed(dO, S, "dO", "S")
    de_state = -begin * mm.right_transposed(X, S, "X", "S")
    dk_state = end * mm.right_transposed(Vn, dS, "Vn", "dS")
    de = de_state + mm(dAkk, k, "dA", "k")
    dq = dq_state + mm(dAqk, k, "dA", "k")
    dk = dk_state + b * de
    dk = dk + mm.left_transposed(dAqk, q, "dA", "q") + mm.left_transposed(b * dAkk, k, "dA", "k")
    dS0 = kept * dS
    dS0 = dS0 + mm.left_transposed(q, scale * begin * dO, "q", "dO") - mm.left_transposed(k, b * begin * X, "k", "X")

    # dg_t: pairs i >= t > j, rows i >= t that read the state, keys j < t that reach the next one, and what passes.
    pairs = jnp.where(strict, dAqk * qk + dAkk * (b * kk), 0.0)
    read = jnp.sum(q * dq_state + b * k * de_state, axis=-1, keepdims=True)
    written = jnp.sum(k * dk_state, axis=-1, keepdims=True)
    C = k.shape[-2]
    later = exact_sums(jnp.where(_triangle(C, -1), 0.0, 1.0), pairs)  # over rows i >= t, of each column
    dg = jnp.sum(jnp.where(strict, later + across_lanes(written), 0.0), axis=-1, keepdims=True) + _from_here_on(read)
    dg = dg + kept * jnp.sum(jnp.sum(S * dS, axis=-1, keepdims=True), axis=-2, keepdims=True)
    db = jnp.sum(de * k, axis=-1, keepdims=True) + jnp.sum(X * v, axis=-1, keepdims=True)
    return Gradients(jnp.sum(dq, 1), jnp.sum(dk, 1), b * X, jnp.where(reset, 0.0, dg), db, dS0)
