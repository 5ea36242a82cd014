"""Windows of tokens for the convolution: a block in float32, behind the tokens before it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..common.registers import F32, iota
from ..common.tiles import CHUNK, LANES
from .geometry import Pipeline
from .parts import Part
from .prologue import HISTORY
from .refs import Inputs, TokenInputs, UnitScratch

__all__ = ["fill_window_of_chunk", "fill_windows"]

Array = Any
Ref = Any


def _pairs(inputs: Inputs, unit: UnitScratch) -> list[tuple[Ref, TokenInputs]]:
    """The windows of q, k and v, and the operands that they are filled from."""
    assert unit.windows is not None
    return [(unit.windows.q, inputs.q), (unit.windows.k, inputs.k), (unit.windows.v, inputs.v)]


def _tile(block: Ref, number: int) -> Array:
    """128 channels of a block [1, rows, channels]."""
    return block[0, :, number * LANES : (number + 1) * LANES]


def _fill_tokens(window: Ref, block: Ref) -> None:
    for n in range(window.shape[0]):
        window[n, HISTORY:] = _tile(block, n).astype(F32)


def fill_windows(p: Pipeline, inputs: Inputs, unit: UnitScratch, first: Array) -> None:
    """The step's tokens, behind the last ones of the step before, or what came before the sequence."""
    tokens = p.U * CHUNK
    pairs = _pairs(inputs, unit)
    for window, _ in pairs:
        window[:, :HISTORY] = window[:, tokens : tokens + HISTORY]

    @pl.when(first)
    def _() -> None:
        for window, x in pairs:
            for n in range(window.shape[0]):
                window[n, :HISTORY] = _tile(x.past[0], n)

    for window, x in pairs:
        _fill_tokens(window, x.now[0])


def fill_window_of_chunk(p: Pipeline, inputs: Inputs, units: list[UnitScratch], u: int, part: Part) -> None:
    """A packed chunk's block, behind the last tokens of the chunk before it, which is the block before it if both are
    of one sequence; where a sequence begins in it, what came before that lies in front of its first token."""
    rows = HISTORY + CHUNK
    pairs = _pairs(inputs, units[u])
    for (window, x), (last, _) in zip(pairs, _pairs(inputs, units[u - 1]), strict=True):
        window[:, :HISTORY] = last[:, CHUNK:rows]
        _fill_tokens(window, x.now[u])

    @pl.when(part.first)
    def _() -> None:
        row = iota((rows, LANES), 0)
        for window, x in pairs:
            for n in range(window.shape[0]):
                before = jnp.zeros((rows, LANES), F32)
                if p.starts:
                    past = _tile(x.past[u], n)
                    before = pltpu.roll(jnp.concatenate([past, jnp.zeros((CHUNK, LANES), F32)], 0), part.begin, 0)
                window[n] = jnp.where(row < HISTORY + part.begin, before, window[n])
