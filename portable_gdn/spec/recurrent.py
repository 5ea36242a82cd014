"""One token of the rule, for arrays of any library: what decoding needs."""

from __future__ import annotations

from .stages import RESET, Array, Namespace, to_channels

__all__ = ["one_token"]


def one_token(
    xp: Namespace, q: Array, k: Array, v: Array, g: Array, b: Array | None, w: Array | None, S: Array, scale: float
) -> tuple[Array, Array]:
    """o [..., V] and the new state [..., K, V].

    Sums over channels are elementwise, in float32 everywhere: no product unit, no rounding of operands.

    Args:
        q, k [..., K]; v [..., V]; g [..., n]; b [..., 1 or K] or None; w [..., 1 or V] or None; S [..., K, V].
    """
    decay = xp.exp(to_channels(xp, xp.where(g < RESET, -xp.inf, g), k.shape[-1]))
    S = decay[..., None] * S
    written = v if w is None else w * v
    if b is not None:
        written = written - xp.sum((b * k)[..., None] * S, axis=-2)
    S = S + k[..., None] * written[..., None, :]
    return scale * xp.sum(q[..., None] * S, axis=-2), S
