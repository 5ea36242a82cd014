"""Blocks of tokens: how gates are cut into them, and which rows of one are a chunk's own, read and written by heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..common.registers import iota
from ..common.tiles import LANES
from .plan import Plan

__all__ = ["Rows", "gates_by_token", "gates_in_blocks"]

Array = Any


def _together(p: Plan, n: int) -> bool:
    """Whether n gates a head of a group of heads are a legal block of all of them as they lie."""
    return p.groups == 1 or p.heads * n % LANES == 0


def gates_in_blocks(p: Plan, a: Array, n: int) -> tuple[Array, tuple[int, ...]]:
    """Gates [B, T, HV, n] as a kernel takes them, and the shape of a block of them.

    As they lie, where that is legal, [B, T, HV n]; else with the groups of heads apart, [B, groups, T, heads * n].
    """
    if _together(p, n):
        return jnp.reshape(a, (p.B, p.T, -1)), (1, p.C, p.heads * n)
    apart = jnp.swapaxes(jnp.reshape(a, (p.B, p.T, p.groups, p.heads * n)), 1, 2)
    return apart, (1, 1, p.C, p.heads * n)


def gates_by_token(p: Plan, a: Array, n: int) -> Array:
    """The way back: what lies like that as [B, T, HV, n]."""
    return jnp.reshape(a if _together(p, n) else jnp.swapaxes(a, 1, 2), (p.B, p.T, -1, n))


class Rows(NamedTuple):
    """Rows ``begin`` to ``end`` of a block of C; the others belong to another chunk or to nobody."""

    p: Plan
    begin: Array
    end: Array

    def own(self, width: int) -> Array:
        """Which they are, [C, width]."""
        row = iota((self.p.C, width), 0)
        return (row >= self.begin) & (row < self.end)

    def heads(self, ref: Any, number: int, width: int, of: int) -> Array:
        """Heads of a block [1, C, number * width] as float32 [P, number / P, C, width], other rows 0."""
        keep = self.own(width)
        parts = [ref[0, :, i * width : (i + 1) * width].astype(jnp.float32) for i in range(number)]
        return jnp.reshape(jnp.stack([jnp.where(keep, a, 0.0) for a in parts]), (self.p.P, of, self.p.C, width))

    def head(self, ref: Any, i: int, width: int) -> Array:
        """One head of a block [1, C, heads * width], or [1, 1, C, heads * width], as float32, other rows 0."""
        whole = ref.at[0] if len(ref.shape) == 3 else ref.at[0, 0]
        return jnp.where(self.own(width), whole[:, i * width : (i + 1) * width].astype(jnp.float32), 0.0)

    def by_head(self, a: Array, width: int) -> Array:
        """Value heads of [C, heads * width] as [P, R, C, width]."""
        parts = [a[:, i * width : (i + 1) * width] for i in range(self.p.heads)]
        return jnp.reshape(jnp.stack(parts), (self.p.P, self.p.R, self.p.C, width))

    def put(self, ref: Any, a: Array, width: int) -> None:
        """Heads [.., C, width] into a block [1, C, heads * width], which keeps rows of other chunks."""
        a = jnp.reshape(a, (-1, self.p.C, width))
        for i in range(a.shape[0]):
            self.put_head(ref, i, a[i])

    def put_head(self, ref: Any, i: int, a: Array) -> None:
        """One head [C, width] into a block [1, C, heads * width], or [1, 1, C, heads * width]."""
        width = a.shape[1]
        whole, lanes = ref.at[0] if len(ref.shape) == 3 else ref.at[0, 0], slice(i * width, (i + 1) * width)
        if self.p.packed:  # else rows outside the chunk are nobody's
            a = jnp.where(self.own(width), a, whole[:, lanes].astype(jnp.float32))
        whole[:, lanes] = a.astype(ref.dtype)

    def put_columns(self, ref: Any, columns: list[Array]) -> None:
        """A column [C, 1] a head into a block [1, 1, C, heads] or [1, C, heads]."""
        lane = iota((self.p.C, len(columns)), 1)
        a = jnp.zeros(lane.shape, jnp.float32)
        for i, column in enumerate(columns):
            a = jnp.where(lane == i, column, a)
        self.put_head(ref, 0, a)
