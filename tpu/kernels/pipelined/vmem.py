"""What a grid step of the pipelined forward kernel holds in VMEM, as named buffers. It does not import jax.

The slots' buffers are those that ``slots`` allocates. Rows of gates, taps and what lies before a sequence are a few
sublanes each, and left out.
"""

from __future__ import annotations

from ..common.buffers import Buffer, bytes_of
from ..common.tiles import CHUNK, LANES, PIECES, SUBLANES
from .geometry import Pipeline

__all__ = ["blocks", "inverse_blocks", "scratch", "slot", "spilled", "spread_by_xlu", "vmem"]

C = CHUNK
_DTYPES = {2: "bfloat16", 4: "float32"}


def operand_dtype(p: Pipeline) -> str:
    """The dtype of operands of products, or of their summands."""
    return "float32" if p.precision == "highest" else "bfloat16"


def spread_by_xlu(p: Pipeline) -> bool:
    """Whether columns of decays are float32 and spread by the XLU, and not in pieces by the matrix unit."""
    return p.precision != "fast"


def _operand(p: Pipeline, name: str, rows: int) -> Buffer:
    """Summands of an operand of products, of every value head."""
    return Buffer(name, (p.heads, p.summands, rows, C), operand_dtype(p))


def inverse_blocks(p: Pipeline) -> list[Buffer]:
    """What the inverse is built in; as in ``slots.Blocks``."""
    lower = [_operand(p, f"low{rows}", rows) for rows in (16, 32, 64)]
    return [Buffer("packed", (p.heads, 16, C), "float32"), *lower, _operand(p, "M", C)]


def slot(p: Pipeline) -> list[Buffer]:
    """Scratch of one chunk, without the blocks of the inverse; as in ``slots.Slot`` and ``ChannelSlot``."""
    if p.by_channel:
        rows = 2 * C if p.widths.erase else C
        return [
            _operand(p, "Aqk", C),
            _operand(p, "kt", C),
            Buffer("reads", (p.heads, rows, C), "bfloat16"),
            Buffer("total", (C, PIECES * p.heads), "bfloat16"),
            Buffer("v", (p.heads, C, C) if p.keeps_values else (SUBLANES, C), "float32"),
        ]
    decays = p.heads * p.decays
    found = [
        Buffer("before", (C, decays), "float32")
        if spread_by_xlu(p)
        else Buffer("before", (C, PIECES * decays), "bfloat16"),
        _operand(p, "Aqk", C),
        _operand(p, "kt", p.key_lanes),
    ]
    if p.changes_keys:
        found += [Buffer(name, (p.P, C, p.key_lanes), operand_dtype(p)) for name in "qk"]
    if p.keeps_values:
        found.append(Buffer("v", (p.heads, C, p.value_lanes), "float32"))
    return found


def blocks(p: Pipeline) -> list[Buffer]:
    """Blocks of operands and results of a grid step."""
    tokens, state, square = p.U * C, (p.heads, p.K, p.V), (p.U, p.heads, p.summands, C, C)
    found = [
        Buffer("q, k, for scores and again for advance", (tokens, p.P * p.K), _DTYPES[p.k_bytes], 4),
        Buffer("v, o", (tokens, p.heads * p.V), _DTYPES[p.v_bytes], 2),
        Buffer("states", state, "float32", (p.U if p.starts else 0) if p.packed else 2),
    ]
    if p.norm is not None:
        found.append(Buffer("z", (tokens, p.heads * p.V), "float32"))  # if it is wider than v
        if "o" in p.keeps:
            found.append(Buffer("kept o", (tokens, p.heads * p.V), _DTYPES[p.v_bytes]))
    if "S" in p.keeps:
        found.append(Buffer("kept S", (p.U, *state), "float32"))
    found += [Buffer(f"kept {name}", square, "bfloat16") for name in p.keeps if name not in ("S", "o")]
    if p.by_channel:
        gates = sum(n > 1 for n in p.widths.given)
        found.append(Buffer("gates by channel", (tokens, p.heads * LANES), "float32", gates))
    return found


def scratch(p: Pipeline) -> list[Buffer]:
    """Scratch beside the slots."""
    units = p.U if p.packed else 1
    found = [Buffer("S", (p.heads, p.key_lanes, p.value_lanes), "float32", units)]
    if p.inside.width:
        channels = 2 * p.P * p.K + p.heads * p.V
        found.append(Buffer("windows of q, k, v", (p.U, channels // LANES, C, LANES), "float32"))
    if p.packed:
        stages = 2 if "o" in p.keeps else 1
        found.append(Buffer("o_stage", (C, p.heads * p.V), _DTYPES[p.v_bytes], stages * p.U))
    return found


def spilled(p: Pipeline) -> list[Buffer]:
    """What registers do not hold, as programs that were compiled had it."""
    wide = p.heads, C, max(p.key_lanes, p.value_lanes)
    found = [
        Buffer("values", wide, "float32", 4),
        Buffer("operands of products", wide, operand_dtype(p), 16 * p.summands),
    ]
    if p.by_channel:
        found.append(Buffer("factors and levels", (p.heads, C, C), "float32", 16))
    if not p.widths.erase:  # such programs hold no blocks of the inverse, and were compiled with as much room
        found.append(Buffer("in the place of e", (p.U, p.heads, C, C), "bfloat16"))
        found += [buffer._replace(number=p.U) for buffer in inverse_blocks(p)]
    return found


def vmem(p: Pipeline) -> int:
    """Bytes of VMEM: blocks twice, since they are fetched ahead, slots, scratch, and what the compiler spills."""
    slots = slot(p) + (inverse_blocks(p) if p.widths.erase else [])
    # Columns of decays are counted as one array of bfloat16, a single tile not at all: the compiler's schedule depends
    # on the limit that it is given, and the figures on file are of limits that were counted so.
    counted = [b for b in slots if b.name not in ("before", "total") and (b.name != "v" or p.keeps_values)]
    counted.append(Buffer("columns of decays", (C, LANES), "bfloat16"))
    return 2 * bytes_of(blocks(p)) + p.U * bytes_of(counted) + bytes_of(scratch(p) + spilled(p))
