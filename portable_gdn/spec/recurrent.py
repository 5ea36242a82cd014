"""The rule for one token, as decoding needs it, for arrays of any library."""

from __future__ import annotations

from collections.abc import Callable

from .chunkwise import ChunkOperands
from .stages import RESET, Array, Namespace, to_channels

__all__ = ["one_token", "weighted_sum"]


def weighted_sum(xp: Namespace, rows: Array, S: Array) -> Array:
    """Compute S^T row [..., V] elementwise in float32: no matrix unit is used, and no operand is rounded."""
    return xp.sum(rows[..., None] * S, axis=-2)


def one_token(
    xp: Namespace,
    x: ChunkOperands,
    scale: float,
    contract: Callable[[Namespace, Array, Array], Array] = weighted_sum,
) -> tuple[Array, Array]:
    """Compute the output o [..., V] of one token, and the new state [..., K, V].

    Args:
        x: the operands of one token, without the chunk's dimension and without ``starts``: q, k [..., K]; v [..., V];
            g [..., n]; b [..., 1 or K] or None; w [..., 1 or V] or None; S [..., K, V].
        scale: the factor of the query.
        contract: computes S^T row. It must not round its operands.
    """
    q, k, v, g, b, w, S, _ = x
    decay = xp.exp(to_channels(xp, xp.where(g < RESET, -xp.inf, g), k.shape[-1]))
    S = decay[..., None] * S
    written = v if w is None else w * v
    if b is not None:
        written = written - contract(xp, b * k, S)
    S = S + k[..., None] * written[..., None, :]
    return scale * contract(xp, q, S), S
