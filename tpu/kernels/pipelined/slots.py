"""Scratch of one chunk of a grid step, which its phases hand on from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from ..common.registers import BF16, F32
from ..common.summands import PIECES, Parts
from ..common.tiles import CHUNK, SUBLANES
from .plan import Pipeline
from .products import operand_dtype

__all__ = ["Blocks", "ChannelSlot", "Slot", "read", "slot", "spread_by_xlu", "write"]

Array = Any
Ref = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """What the inverse of a chunk's matrix I + A is built from, and the inverse; n summands, where there are some.

    Attributes:
        packed: [heads, 16, C] float32: diagonal blocks of 16 side by side, then their inverses.
        low16: [heads, n, 16, C]: A between blocks of 16 of one block of 32.
        low32: [heads, n, 32, C]: A between blocks of 32 of one block of 64, the second pair rolled beside the first.
        low64: [heads, n, 64, C]: A between the two blocks of 64, in the first 64 lanes.
        M: [heads, n, C, C]; before it is whole, blocks of 32 side by side and the product for the next level.
    """

    packed: Ref
    low16: Ref
    low32: Ref
    low64: Ref
    M: Ref


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slot:
    """Scratch of one chunk, from its ``scores`` to its ``advance``, with one decay a head or a few.

    Attributes:
        before: columns of 2^G, 0 behind a reset, a decay each: as of ``gates.Gates``.
        Aqk: [heads, n, C, C].
        kt: [heads, n, key lanes, C]: keys decayed to the chunk's end, transposed, and with beta.
        blocks: of the inverse.
        q, k: [P, C, key lanes], where they are not what lies in HBM.
        v: [heads, C, value lanes] float32, behind a convolution.
    """

    before: Ref
    Aqk: Ref
    kt: Ref
    blocks: Blocks
    q: Ref | None
    k: Ref | None
    v: Ref | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChannelSlot:
    """Scratch of one chunk, from ``scores`` to ``advance``, with decays by channel.

    Attributes:
        Aqk, kt: as of ``Slot``, [heads, n, C, C] each.
        reads: [heads, 2 C, C] bfloat16: q, and below it e where there is an erase gate, decayed from the chunk's start.
        total: [C, PIECES * heads] bfloat16: columns of the whole chunk's decay.
        v: [heads, C, C] float32: what is written, where it is not v as it lies in HBM; else one tile.
        blocks: of the inverse, or None without an erase gate.
    """

    Aqk: Ref
    kt: Ref
    reads: Ref
    total: Ref
    v: Ref
    blocks: Blocks | None


def spread_by_xlu(p: Pipeline) -> bool:
    """Whether columns of decays are float32 and spread by the XLU, and not in pieces by the matrix unit."""
    return p.precision != "fast"


def _blocks(p: Pipeline) -> Blocks:
    wide = lambda rows: pltpu.VMEM((p.heads, p.summands, rows, CHUNK), operand_dtype(p))  # noqa: E731
    return Blocks(pltpu.VMEM((p.heads, 16, CHUNK), F32), wide(16), wide(32), wide(64), wide(CHUNK))


def slot(p: Pipeline) -> Slot | ChannelSlot:
    """What a chunk's slot allocates."""
    C = CHUNK
    wide = lambda rows: pltpu.VMEM((p.heads, p.summands, rows, C), operand_dtype(p))  # noqa: E731
    if p.by_channel:
        erase = p.widths.erase > 0
        return ChannelSlot(
            Aqk=wide(C),
            kt=wide(C),
            reads=pltpu.VMEM((p.heads, 2 * C if erase else C, C), BF16),
            total=pltpu.VMEM((C, PIECES * p.heads), BF16),
            v=pltpu.VMEM((p.heads, C, C) if p.keeps_values else (SUBLANES, C), F32),
            blocks=_blocks(p) if erase else None,
        )
    decays = p.heads * p.decays
    keys = pltpu.VMEM((p.P, C, p.key_lanes), operand_dtype(p)) if p.changes_keys else None
    return Slot(
        before=pltpu.VMEM((C, decays), F32) if spread_by_xlu(p) else pltpu.VMEM((C, PIECES * decays), BF16),
        Aqk=wide(C),
        kt=wide(p.key_lanes),
        blocks=_blocks(p),
        q=keys,
        k=keys,
        v=pltpu.VMEM((p.heads, C, p.value_lanes), F32) if p.inside.width else None,
    )


def write(ref: Ref, head: int, parts: Parts, rows: slice = slice(None)) -> None:
    """Store a head's summands [rows, lanes] in a slot's array [heads, summands, rows, lanes]."""
    for n, part in enumerate(parts):
        ref[head, n, rows] = part


def read(ref: Ref, head: int, rows: slice = slice(None)) -> Parts:
    """A head's summands of a slot's array, or some rows of them."""
    return tuple(ref[head, n, rows] for n in range(ref.shape[1]))
