"""The sizes that everything on a TPU is cut by. It does not import jax."""

from __future__ import annotations

__all__ = ["CHUNK", "LANES", "PIECES", "SUBLANES", "whole_lanes"]

#: Lanes of a register, and of a tile in memory.
LANES = 128
#: Sublanes of a register: rows of a float32 tile.
SUBLANES = 8
#: Tokens a chunk: an MXU's side (v5e, v5p) or half of it (v6e, v7x), and as many as lanes: scores fill registers.
CHUNK = LANES
#: bfloat16 pieces of a float32 number that add up to it exactly.
PIECES = 3


def whole_lanes(width: int) -> int:
    """``width`` rounded up to whole registers of lanes, which is what it takes in VMEM."""
    return -(-width // LANES) * LANES
