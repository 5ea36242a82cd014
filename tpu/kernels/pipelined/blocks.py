"""What the pipelined forward kernel takes and returns, and which blocks of it a grid step gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ... import table as tb
from ..common.gradients import Kept
from ..common.launching import Block
from ..common.registers import BF16, F32, divided
from ..common.tiles import CHUNK
from .geometry import Pipeline
from .parts import late, now
from .prologue import HISTORY
from .refs import Inputs, Outputs, Scratch, TokenInputs, UnitScratch, Windows
from .slots import slot

__all__ = [
    "Channels", "Epilogue", "GateOperands", "Prologue", "TokenOperands", "input_blocks", "output_blocks", "scratch",
]  # fmt: skip

Array = Any
#: Row, group of heads, block of tokens and state of what a grid step works on, as numbers of blocks.
Place = tuple[Array, Array, Array, Array]


class Channels(NamedTuple):
    """q, k or v: an array whose last axis holds its channels, from the given one on; heads side by side."""

    array: Array
    first: int


class TokenOperands(NamedTuple):
    """q, k and v [B, T, channels]: bfloat16 q and k, unless there is a norm or a convolution before them, or products
    round nothing."""

    q: Channels
    k: Channels
    v: Channels


class Prologue(NamedTuple):
    """What a convolution inside needs: taps of q, k and v, [``prologue.tap_rows``, channels] float32; past, the 8
    inputs before the first of each sequence, [B or N, 8, channels] float32."""

    taps: tuple[Channels, Channels, Channels]
    past: tuple[Channels, Channels, Channels]


class GateOperands(NamedTuple):
    """g: log decay, or the gate's raw projection; b: beta, or erase gates; w: write gates. As many a head as the widths
    say [B, T, HV n], float32 or, by channel, any float; None where they say 0, or w is b. parameters of the gate, where
    it is inside: A_log and dt_bias of each decay [2, HV n] float32, or by channel exp(A_log) and dt_bias.
    """

    g: Array
    b: Array | None
    w: Array | None
    parameters: Array | None


class Epilogue(NamedTuple):
    """What an output norm inside needs: its weight [V] float32; its gate z [B, T, HV V], or None."""

    weight: Array
    z: Array | None


def _place(p: Pipeline, u: int | None, when: Any, part: Array, entry: Array, *table: Any) -> Place:
    """The place of a grid step of one of the cores' parts, or of its chunk u."""
    at = when(entry)
    rest, step = divided(at, p.steps), lax.rem(at, jnp.int32(p.steps))
    rest = rest + part * (p.entries // p.steps)
    row, group = divided(rest, p.groups), lax.rem(rest, jnp.int32(p.groups))
    if u is None:
        return row, group, step, row
    words = (step * p.U + u) * tb.WORDS
    return row, group, table[0][words + tb.BLOCK], table[0][words + tb.SLOT]


class _Blocks:
    """Blocks of operands; of packed sequences each of a grid step's chunks gets one."""

    def __init__(self, p: Pipeline) -> None:
        self.p = p
        self.tokens, self.units = (CHUNK, [*range(p.U)]) if p.packed else (p.U * CHUNK, [None])

    def one(self, array: Array, shape: tuple[int, ...], when: Any, place: Any, u: int | None = None) -> Block:
        """The same block for all chunks of a step, or that of chunk u. place: of a ``Place``, the block's indices."""
        return Block(array, pl.BlockSpec(shape, lambda *at: place(*_place(self.p, u, when, *at))))

    def each(self, array: Array, shape: tuple[int, ...], when: Any, place: Any) -> list[Block]:
        """One for a step, or of packed sequences one for each of its chunks."""
        return [self.one(array, shape, when, place, u) for u in self.units]

    def channels(self, x: Channels, width: int, rows: int, when: Any, place: Any) -> list[Block]:
        """Blocks of ``width`` channels of each group of heads; where they do not begin at a multiple of it, they are
        cut out before."""
        array, first = x
        if first % width:
            array, first = lax.slice_in_dim(array, first, first + self.p.groups * width, axis=-1), 0
        shape = (rows, width) if array.ndim == 2 else (1, rows, width)
        return self.each(array, shape, when, lambda r, h, c, n: place(r, h + first // width, c, n))

    def shared(self, x: Channels, width: int, rows: int, place: Any) -> Block:
        """The block of what all chunks of a grid step share."""
        blocks = self.channels(x, width, rows, partial(now, self.p), place)
        return blocks[0]


def _by_token(r: Array, h: Array, c: Array, n: Array) -> tuple[Array, ...]:
    return r, c, h


def _token_blocks(blocks: _Blocks, name: str, x: Channels, width: int, prologue: Prologue | None) -> TokenInputs:
    """The blocks of q, k or v: what ``scores`` takes, and what ``advance`` reads once more where it takes it as it lies
    in HBM."""
    p = blocks.p
    if name == "v":
        scored, advanced = p.keeps_values, not p.keeps_values
    else:
        scored, advanced = True, not (p.by_channel or p.changes_keys)
    array = {}
    if scored:
        array["now"] = blocks.channels(x, width, blocks.tokens, partial(now, p), _by_token)
    if advanced:
        array["late"] = blocks.channels(x, width, blocks.tokens, late, _by_token)
    if prologue is None:
        return TokenInputs(**array)
    number = "qkv".index(name)
    taps, past = prologue.taps[number], prologue.past[number]
    array["taps"] = blocks.shared(taps, width, taps.array.shape[0], lambda r, h, c, n: (0, h))
    if p.starts or not p.packed:
        array["past"] = blocks.channels(past, width, HISTORY, partial(now, p), lambda r, h, c, n: (n, 0, h))
    return TokenInputs(**array)


def _gate_blocks(blocks: _Blocks, a: Array, width: int) -> list[Block]:
    """The blocks of a gate: by channel as it lies, else with heads in sublanes and tokens in lanes."""
    p = blocks.p
    if p.by_channel and width > 1:
        return blocks.channels(Channels(a, 0), p.heads * width, blocks.tokens, partial(now, p), _by_token)
    rows = jnp.reshape(jnp.swapaxes(a, 1, 2), (p.B, p.groups, p.heads * width, p.T))
    shape = (1, 1, p.heads * width, blocks.tokens)
    return blocks.each(rows, shape, partial(now, p), lambda r, h, c, n: (r, h, 0, c))


def _parameter_block(blocks: _Blocks, parameters: Array) -> Block:
    """The block of the gate's parameters."""
    p = blocks.p
    if p.by_channel:
        return blocks.shared(Channels(parameters, 0), p.heads * p.K, 2, lambda r, h, c, n: (0, h))
    decays = p.heads * p.decays
    columns = jnp.reshape(parameters.T, (p.groups, decays, 2))
    place = lambda r, h, c, n: (h, 0, 0)  # noqa: E731
    return blocks.each(columns, (1, decays, 2), partial(now, p), place)[0]


def input_blocks(
    p: Pipeline,
    tokens: TokenOperands,
    gates: GateOperands,
    S: Array | None,
    prologue: Prologue | None,
    epilogue: Epilogue | None = None,
) -> Inputs:
    """All operands of the kernel; as in ``forward.forward``."""
    blocks = _Blocks(p)
    widths = (p.P * p.K, p.P * p.K, p.heads * p.V)
    q, k, v = (_token_blocks(blocks, n, x, w, prologue) for n, x, w in zip("qkv", tokens, widths, strict=True))
    g = _gate_blocks(blocks, gates.g, p.widths.decay)
    b = _gate_blocks(blocks, gates.b, p.widths.erase) if p.widths.erase else None
    w = _gate_blocks(blocks, gates.w, p.V) if p.widths.write > 1 else None
    parameters = None if gates.parameters is None else _parameter_block(blocks, gates.parameters)
    first = None
    if p.starts or not p.packed:
        first = blocks.each(S, (1, p.heads, p.K, p.V), late, lambda r, h, c, n: (n, h, 0, 0))
    z = weight = None
    if epilogue is not None:
        weight = Block(epilogue.weight[None], pl.BlockSpec((1, p.V), lambda *at: (0, 0)))
        if epilogue.z is not None:
            z = blocks.channels(Channels(epilogue.z, 0), widths[2], blocks.tokens, late, _by_token)
    return Inputs(q, k, v, g, b, w, parameters, first, z, weight)


def output_blocks(p: Pipeline, dtypes: tuple[Any, Any]) -> Outputs:
    """All results of the kernel; dtypes: of o, and of what is kept of it before its norm."""
    blocks, HV = _Blocks(p), p.groups * p.heads

    def block(array: Any, shape: tuple[int, ...], place: Callable[..., Any]) -> Block:
        return blocks.one(array, shape, late, place)

    state = (p.N or p.B, HV, p.K, p.V)
    if p.packed:  # what is sent by hand is not to lie in VMEM; whole blocks of the output, since they are sent as such
        by_hand = pl.BlockSpec(memory_space=pltpu.HBM)
        o, o_kept = (Block(pltpu.HBM((p.blocks * CHUNK, HV * p.V), dtype), by_hand) for dtype in dtypes)
        final = Block(pltpu.HBM(state, F32), by_hand)
    else:
        of_row = lambda dtype: jax.ShapeDtypeStruct((p.B, p.T, HV * p.V), dtype)  # noqa: E731
        o, o_kept = (block(of_row(dtype), (1, blocks.tokens, p.heads * p.V), _by_token) for dtype in dtypes)
        place = lambda r, h, c, n: (r, h, 0, 0)  # noqa: E731
        final = block(jax.ShapeDtypeStruct(state, F32), (1, p.heads, p.K, p.V), place)
    chunks = p.chunks if p.whole_steps else p.blocks + max(p.N - 1, 0)
    kept = {}
    for name in (field.name for field in fields(Kept) if field.name in p.keeps):
        inner, of = ((p.K, p.V), F32) if name == "S" else ((p.summands, CHUNK, CHUNK), BF16)
        rest = (0,) * len(inner)
        array = jax.ShapeDtypeStruct((p.B, chunks, HV, *inner), of)
        kept[name] = block(array, (1, p.U, p.heads, *inner), lambda r, h, c, n, rest=rest: (r, c, h, *rest))
    return Outputs(o, final, Kept(**kept), o_kept if "o" in p.keeps else None)


def scratch(p: Pipeline, dtypes: tuple[Any, Any]) -> Scratch:
    """All scratch of the kernel; dtypes: as in ``output_blocks``."""
    tokens, units = (CHUNK, p.U) if p.packed else (p.U * CHUNK, 1)
    windows = o_stage = kept_stage = S_stage = sent = None
    if p.inside.width:
        window = lambda width: pltpu.VMEM((width // CHUNK, HISTORY + tokens, CHUNK), F32)  # noqa: E731
        windows = Windows(window(p.P * p.K), window(p.P * p.K), window(p.heads * p.V))
    if p.packed:
        o_stage, kept_stage = (pltpu.VMEM((CHUNK, p.heads * p.V), dtype) for dtype in dtypes)
        kept_stage = kept_stage if "o" in p.keeps else None
        sent = pltpu.SemaphoreType.DMA((p.U,))
        if not all(span.whole for span in (*p.keys, *p.values)):
            S_stage = pltpu.VMEM((p.heads, p.K, p.V), F32)
    state = pltpu.VMEM((p.heads, p.key_lanes, p.value_lanes), F32)
    unit = UnitScratch(state, windows, o_stage, S_stage, kept_stage)
    return Scratch([unit] * units, sent, sent, [slot(p)] * p.U, None if kept_stage is None else sent)
