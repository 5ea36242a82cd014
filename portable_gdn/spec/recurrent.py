"""One token of the rule, for arrays of any library: what decoding needs."""

from __future__ import annotations

from collections.abc import Callable

from .chunkwise import ChunkOperands
from .stages import RESET, Array, Namespace, to_channels

__all__ = ["one_token", "weighted_sum"]


def weighted_sum(xp: Namespace, rows: Array, S: Array) -> Array:
    """S^T row, elementwise in float32 everywhere: no product unit, no rounding of operands. [..., V]"""
    return xp.sum(rows[..., None] * S, axis=-2)


def one_token(
    xp: Namespace,
    x: ChunkOperands,
    scale: float,
    contract: Callable[[Namespace, Array, Array], Array] = weighted_sum,
) -> tuple[Array, Array]:
    """o [..., V] and the new state [..., K, V].

    Args:
        x: q, k [..., K]; v [..., V]; g [..., n]; b [..., 1 or K] or None; w [..., 1 or V] or None; S [..., K, V], of
            one token, without the chunk's dimension; no ``starts``.
        contract: S^T row; another must not round its operands either.
    """
    q, k, v, g, b, w, S, _ = x
    decay = xp.exp(to_channels(xp, xp.where(g < RESET, -xp.inf, g), k.shape[-1]))
    S = decay[..., None] * S
    written = v if w is None else w * v
    if b is not None:
        written = written - contract(xp, b * k, S)
    S = S + k[..., None] * written[..., None, :]
    return scale * contract(xp, q, S), S
