"""Scratch of one chunk of a grid step, which its phases hand on from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..common.buffers import Buffer
from ..common.summands import Parts
from . import vmem
from .geometry import Pipeline

__all__ = ["Blocks", "ChannelSlot", "Slot", "read", "slot", "write"]

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
    """Scratch of one chunk, from its ``scores`` to its ``advance``, with one decay per head or a few.

    Attributes:
        before: columns of 2^G, 0 behind a reset, a decay each: as in ``gates.Gates``.
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
        Aqk, kt: as in ``Slot``, [heads, n, C, C] each.
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


def _allocated(buffers: list[Buffer]) -> dict[str, Any]:
    """Buffers by name, as the kernel allocates them."""
    return {buffer.name: pltpu.VMEM(buffer.shape, jnp.dtype(buffer.dtype)) for buffer in buffers}


def slot(p: Pipeline) -> Slot | ChannelSlot:
    """What a chunk's slot allocates: the buffers that the plan has counted."""
    blocks = Blocks(**_allocated(vmem.inverse_blocks(p))) if p.widths.erase else None
    found = _allocated(vmem.slot(p))
    if p.by_channel:
        return ChannelSlot(**found, blocks=blocks)
    assert blocks is not None
    return Slot(**{"q": None, "k": None, "v": None, **found}, blocks=blocks)


def write(ref: Ref, head: int, parts: Parts, rows: slice = slice(None)) -> None:
    """Store a head's summands [rows, lanes] in a slot's array [heads, summands, rows, lanes]."""
    for n, part in enumerate(parts):
        ref[head, n, rows] = part


def read(ref: Ref, head: int, rows: slice = slice(None)) -> Parts:
    """A head's summands of a slot's array, or some rows of them."""
    return tuple(ref[head, n, rows] for n in range(ref.shape[1]))
