"""The short causal convolution that precedes the rule in most models, with its state, for any array namespace.

y_t = activation(bias + sum_j weight[:, j] x_{t - (W - 1) + j}), so the last tap multiplies the current token. The
inputs before a sequence's first token come from its state, the last W - 1 inputs [N, W - 1, channels]; without a state
they are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import suggesting
from .gates import sigmoid
from .sequences import Layout, compact, index_range, restore
from .stages import Array, Namespace

__all__ = ["ShortConv", "convolve", "convolve_one", "final_state", "taps"]


@suggesting
@dataclass(frozen=True)
class ShortConv:
    """A depthwise causal convolution over the channels of q, k and v, in this order.

    Args:
        weight: the taps [channels, W], or [channels, 1, W] as in torch; the last tap multiplies the current token.
        bias: [channels], or None for no bias.
        activation: "silu", or None for no activation.
    """

    weight: Any
    bias: Any = None
    activation: str | None = "silu"


def taps(xp: Namespace, x: Array, place: Layout, state: Array | None, width: int) -> list[Array]:
    """Return the inputs that each token sees, oldest first: W arrays [B, T, channels], in compacted order."""
    seen = []
    for back in range(width - 1, 0, -1):
        lead = [xp.zeros_like(x[:, :1])] * back
        shifted = xp.concat([*lead, x], axis=1)[:, : x.shape[1]]
        before = xp.zeros_like(x)
        if state is not None:
            slot = xp.clip(width - 1 - back + place.position, 0, width - 2)
            before = xp.where(place.fresh[..., None], before, state[place.sequence, slot])
        seen.append(xp.where((place.position >= back)[..., None], shifted, before))
    return [*seen, x]


def convolve(
    xp: Namespace,
    x: Array,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    place: Layout,
    state: Array | None,
) -> Array:
    """Convolve x [B, T, channels] with weight [channels, W], and return y [B, T, channels].

    Tokens are in the caller's order; ``place`` is their layout.
    """
    seen = taps(xp, compact(xp, x, place.order), place, state, weight.shape[1])
    return restore(xp, _activated(xp, seen, weight, bias, activation), place.back)


def _activated(xp: Namespace, seen: list[Array], weight: Array, bias: Array | None, activation: str | None) -> Array:
    """Compute y from the inputs that each token sees, oldest first."""
    y = sum(tap * weight[:, j] for j, tap in enumerate(seen))
    y = y if bias is None else y + bias
    return y * sigmoid(xp, y) if activation == "silu" else y


def convolve_one(
    xp: Namespace, x: Array, weight: Array, bias: Array | None, activation: str | None, state: Array | None
) -> tuple[Array, Array]:
    """Convolve one token x [B, 1, channels]; return y [B, 1, channels] and the state after it [B, W - 1, channels]."""
    if state is None:
        state = xp.zeros_like(x[:, :1] * weight.T[None, 1:])
    seen = xp.concat([state, x], axis=1)
    y = _activated(xp, [seen[:, j : j + 1] for j in range(weight.shape[1])], weight, bias, activation)
    return y, seen[:, 1:]


def final_state(xp: Namespace, x: Array, place: Layout, state: Array | None, width: int) -> Array:
    """Return the last W - 1 inputs of each sequence [N, W - 1, channels].

    If a sequence has fewer tokens, the oldest inputs come from ``state``.
    """
    x = compact(xp, x, place.order)
    sequences = place.first.shape[0]
    every = index_range(xp, place.first, sequences)
    rows = []
    for r in range(width - 1):
        position = place.length - (width - 1) + r
        inside = position >= 0
        at = xp.clip(place.first + position, 0, max(x.shape[1] - 1, 0))
        index = xp.zeros_like(at) if x.shape[0] == 1 else every
        taken = x[index, at] if x.shape[1] else xp.zeros((sequences, x.shape[2]), dtype=x.dtype)
        before = xp.zeros_like(taken)
        if state is not None:
            slot = xp.clip(width - 1 + position, 0, width - 2)
            before = state[every, slot]
            before = xp.where(place.restarted[:, None], xp.zeros_like(before), before)
        rows.append(xp.where(inside[:, None], xp.astype(taken, before.dtype), before))
    return xp.stack(rows, axis=1) if rows else xp.zeros((sequences, 0, x.shape[2]), dtype=x.dtype)
