"""What the plain kernels take and return, and which blocks of it a grid step gets; forward and backward alike.

Grid: (groups of heads, chunks). A table in scalar memory says which block of tokens a chunk lies in; the backward
kernel goes through it from the last chunk to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import table as tb
from ..common.gradients import Kept
from ..common.launching import Block, Launch
from . import stages as own_stages
from .plan import Plan
from .rows import gates_in_blocks

__all__ = ["BackwardInputs", "Blocks", "ForwardInputs", "Gradients", "Making", "PlainOperands", "Results"]

Array = Any
Ref = Any


class PlainOperands(NamedTuple):
    """The bare rule's operands as the plain kernels take them.

    q, k: [B, T, H, K] bfloat16, or float32 for "highest". v: [B, T, HV, V] bfloat16 or float32. gates: log decay, and
    erase and write gate where they are given, [B, T, HV, width] float32; one for both where they are shared.
    """

    q: Array
    k: Array
    v: Array
    gates: tuple[Array, ...]


class Making(NamedTuple):
    """How a plain kernel is made. interpret: False, True (generic) or ``pltpu.InterpretParams``; stages: the functions
    that it is made of, those of ``stages`` or of another module with the same names."""

    interpret: Any = False
    stages: ModuleType | Any = own_stages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardInputs:
    """What the forward kernel reads: q, k [1, C, P K]; v [1, C, heads V]; gates [1, C, heads n] or [1, 1, C, heads n];
    before, the states that sequences start from [1, heads, K, V]."""

    q: Ref
    k: Ref
    v: Ref
    gates: tuple[Ref, ...]
    before: Ref


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Results:
    """What the forward kernel writes: o [1, C, heads V]; after, the final states [1, heads, K, V]; and what it is asked
    to show of a chunk, [1, heads, rows, columns] each."""

    o: Ref
    after: Ref
    probes: tuple[Ref, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardInputs:
    """What the backward kernel reads: q, k, v and gates as the forward kernel; what that kept; the cotangents of the
    output [1, C, heads V] and of the final states [1, heads, K, V]."""

    q: Ref
    k: Ref
    v: Ref
    gates: tuple[Ref, ...]
    kept: Kept
    dO: Ref
    dS_after: Ref


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """What the backward kernel writes: cotangents in the blocks of their operands, and those of the states that
    sequences start from [1, heads, K, V]."""

    q: Ref
    k: Ref
    v: Ref
    gates: tuple[Ref, ...]
    dS_before: Ref


class Blocks(NamedTuple):
    """The blocks of a plan's grid; backward: from the last chunk to the first."""

    p: Plan
    backward: bool = False

    def launch(self, name: str, vmem_limit: int | None, interpret: Any) -> Launch:
        """How a kernel with this grid is launched."""
        return Launch(name, (self.p.groups, self.p.chunks), vmem_limit, interpret)

    def _chunk(self, c: Any) -> Any:
        return self.p.chunks - 1 - c if self.backward else c

    def _place(self, c: Any, table: Any) -> tuple[Any, Any]:
        """The row and the block of tokens of a chunk."""
        block = table[self._chunk(c) * tb.WORDS + tb.BLOCK]
        return lax.div(block, jnp.int32(self.p.blocks)), lax.rem(block, jnp.int32(self.p.blocks))

    def _tokens(self, h: Any, c: Any, table: Any) -> tuple[Any, ...]:
        return (*self._place(c, table), h)

    def _column(self, h: Any, c: Any, table: Any) -> tuple[Any, ...]:
        row, block = self._place(c, table)
        return row, h, block, 0

    def _slot(self, h: Any, c: Any, table: Any) -> tuple[Any, ...]:
        return table[self._chunk(c) * tb.WORDS + tb.SLOT], h, 0, 0

    def keys(self, a: Any) -> Block:
        """The block of q or k [B, T, H K], or their gradients."""
        return Block(a, pl.BlockSpec((1, *self.p.key_block), self._tokens))

    def values(self, a: Any) -> Block:
        """The block of v, o or their cotangents [B, T, HV V]."""
        return Block(a, pl.BlockSpec((1, *self.p.value_block), self._tokens))

    def gates(self, gates: tuple[Array, ...]) -> tuple[Block, ...]:
        """The blocks of gates [B, T, HV, n], as they lie where that is a legal block, else with the groups of heads
        apart."""
        found = []
        for a, n in zip(gates, self.p.widths.given, strict=True):
            as_laid, shape = gates_in_blocks(self.p, a, n)
            found.append(Block(as_laid, pl.BlockSpec(shape, self._tokens if len(shape) == 3 else self._column)))
        return tuple(found)

    def states(self, a: Any) -> Block:
        """The block of states [N, HV, K, V]."""
        return Block(a, pl.BlockSpec((1, *self.p.state), self._slot))

    def of_chunk(self, a: Any) -> Block:
        """The block of what there is of every chunk of the table, [chunks, HV, ...]."""
        rest = a.shape[2:]
        place = lambda h, c, t: (self._chunk(c), h, *(0,) * len(rest))  # noqa: E731
        return Block(a, pl.BlockSpec((1, self.p.heads, *rest), place))
