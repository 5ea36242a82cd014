"""Sums of log decays since the last reset, heads in sublanes and tokens in lanes, as a tree over the tokens of a chunk.

To each right block of 1, 2, 4, ... tokens comes the last sum of the left one, as ``spec.stages.decay`` adds them: a
gate of 0 leaves the sum as it was, to the bit. Sums are of base-2 logarithms, since that is what ``exp2`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ....spec.stages import RESET
from .registers import block_of, iota, within

__all__ = ["LaneDecays", "by_masks", "by_shifts", "decay_sums", "to_chunk_end"]

Array = Any
Halves = Callable[[Array, int], tuple[Array, Array]]

LOG2E = 1.4426950408889634


class LaneDecays(NamedTuple):
    """Decays of a chunk or of several, [decays, C], a token a lane.

    lane: its number. reset: whether its gate is a reset, bool. last_reset: the last reset up to it, or -1, int32. sum:
    the base-2 sum of log decays since then, float32. next_reset: the first reset behind it, or 2 C, int32; None where
    nobody asked for it.
    """

    lane: Array
    reset: Array
    last_reset: Array
    sum: Array
    next_reset: Array | None

    @property
    def from_start(self) -> Array:
        """2^sum where no reset lies between the chunk's start and the token, else 0. [decays, C]"""
        return jnp.where(self.last_reset < 0, jnp.exp2(self.sum), 0.0)


def by_shifts(lane: Array, size: int) -> tuple[Array, Array]:
    """The last lane of the left one of two blocks of ``size`` lanes, and whether a lane lies in the right one."""
    return block_of(lane, 2 * size) * (2 * size) + size - 1, within(lane, 2 * size) >= size


def by_masks(lane: Array, size: int) -> tuple[Array, Array]:
    """The same numbers as ``by_shifts``. Which of both a kernel is made with moves its schedule by up to 0.3 %, one way
    on one chip and the other way on another; each keeps the one that its figures on file are of."""
    return (lane & -(2 * size)) + size - 1, (lane & size) != 0


def decay_sums(g: Array, halves: Halves, look_ahead: bool = False) -> LaneDecays:
    """The sums of log decays g [decays, C] float32; halves: ``by_shifts`` or ``by_masks``; ``look_ahead``: the next
    resets, too."""
    C, lane = g.shape[1], iota(g.shape, 1)
    reset = g < RESET
    last, G, size = jnp.where(reset, lane, -1), jnp.where(reset, 0.0, g) * LOG2E, 1
    behind = None
    if look_ahead:
        behind = jnp.where(lane == C - 1, 2 * C, pltpu.roll(jnp.where(reset, lane, 2 * C), C - 1, 1))
    while size < C:
        end_of_left, in_right = halves(lane, size)
        goes_on = in_right & (last < 0)  # last: the last reset in the token's block, so far
        G = G + jnp.where(goes_on, jnp.take_along_axis(G, end_of_left, axis=1), 0.0)
        last = jnp.where(goes_on, jnp.take_along_axis(last, end_of_left, axis=1), last)
        if behind is not None:
            behind = jnp.minimum(behind, jnp.where(lane < C - size, pltpu.roll(behind, C - size, 1), 2 * C))
        size *= 2
    return LaneDecays(lane, reset, last, G, behind)


def to_chunk_end(decays: LaneDecays) -> tuple[Array, Array]:
    """Whether no reset lies between a token and the chunk's end, and the sum of log decays between them, 0 where one
    does. [decays, C] each."""
    C = decays.lane.shape[1]
    seen = decays.lane >= jnp.max(decays.last_reset, 1, keepdims=True)
    total = jnp.sum(jnp.where(decays.lane == C - 1, decays.sum, 0.0), 1, keepdims=True)
    return seen, jnp.where(seen, total - decays.sum, 0.0)
