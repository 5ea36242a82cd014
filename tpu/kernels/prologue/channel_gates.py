"""Log decays by channel of raw projections, and their cotangents, for the backward pass: arrays as wide as the keys.

    softplus   g = -rate log(1 + exp x)      dx = -rate sigmoid(x) dg               dA = g dg
    bounded    g = bound sigmoid(rate x)     dx = rate bound s (1 - s) dg           dA = x dx

with x = raw + dt_bias and rate = exp(A_log). As in ``spec.gates``, both are 0 at a reset and where the activation is
saturated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....spec.stages import RESET
from ..common.launching import pallas_call, result_shapes
from ..common.tiles import LANES
from ..pipelined.prologue import channel_decay
from .forward import F32, at_lanes

__all__ = ["ChannelGates", "channel_gate_gradients", "channel_gates"]

Array = Any
#: Rows that are in registers at a time.
ROWS = 32
#: Rows of the array of parameters, of which two are used, and the sums of a gradient, eight rows each.
PARAMETERS, SUMS = 8, 16
#: Above it exp(A_log) does not scale a cotangent where x is 0, as in ``spec.gates``.
_STEEP = 5.5e34


class ChannelGates(NamedTuple):
    """The static numbers of both kernels: B rows, T tokens, channels of all heads; R tokens and L channels a block;
    lower_bound of a bounded gate, None for softplus; packed: whether sequences may end before T; vmem: bytes that the
    compiler may use."""

    B: int
    T: int
    channels: int
    R: int
    L: int
    lower_bound: float | None
    packed: bool
    vmem: int


def _tiles(p: ChannelGates, run: Callable[[slice, Any], None]) -> None:
    def turn(i: Array, carry: Array) -> Array:
        for r in range(0, p.R, ROWS):
            run(slice(r, min(r + ROWS, p.R)), at_lanes(i))
        return carry

    lax.fori_loop(0, p.L // LANES, turn, jnp.int32(0))


def _values(p: ChannelGates, raw: Any, parameters: Any, g: Any) -> None:
    def tile(rows: slice, lanes: Any) -> None:
        rate, bias = parameters[0:1, lanes], parameters[1:2, lanes]
        g[0, rows, lanes] = channel_decay(p, raw[0, rows, lanes].astype(F32), rate, bias)  # type: ignore[arg-type]

    _tiles(p, tile)


def _slopes(p: ChannelGates, x: Array, rate: Array) -> tuple[Array, Array]:
    """dx and dA for dg = 1."""
    if p.lower_bound is None:
        small = jnp.exp(-jnp.abs(x))
        soft = jnp.maximum(x, 0.0) + jnp.log1p(small)
        g = -rate * soft
        fixed = (soft == 0.0) | (g < RESET)
        dx = -rate * (jnp.where(x >= 0, 1.0, small) / (1.0 + small))
        return jnp.where(fixed, 0.0, dx), jnp.where(fixed, 0.0, g)
    z = jnp.where(x == 0, 0.0, rate * x)
    fixed = jnp.abs(z) > -RESET
    small = jnp.exp(-jnp.abs(z))
    dz = p.lower_bound * small / ((1.0 + small) * (1.0 + small))
    slope = jnp.where((x == 0) & (rate > _STEEP), 1.0, rate)
    return jnp.where(fixed, 0.0, slope * dz), jnp.where(fixed, 0.0, z * dz)


def _gradients(p: ChannelGates, end: Any, raw: Any, dg: Any, parameters: Any, d_raw: Any, sums: Any) -> None:
    row, block = pl.program_id(1), pl.program_id(2)
    left = (end[0] if p.packed else p.T) - block * p.R  # tokens of sequences in this block and behind it

    @pl.when((row == 0) & (block == 0))
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, F32)

    def run(masks: bool) -> None:
        def tile(rows: slice, lanes: Any) -> None:
            rate, bias = parameters[0:1, lanes], parameters[1:2, lanes]
            dx, dA = _slopes(p, raw[0, rows, lanes].astype(F32) + bias, rate)
            d = dg[0, rows, lanes]
            dx, dA = dx * d, dA * d
            if masks:
                there = lax.broadcasted_iota(jnp.int32, d.shape, 0) + rows.start < left
                dx, dA = jnp.where(there, dx, 0.0), jnp.where(there, dA, 0.0)
            d_raw[0, rows, lanes] = dx.astype(d_raw.dtype)
            for n, a in enumerate((dx, dA)):
                sums[n * 8 : (n + 1) * 8, lanes] += jnp.sum(jnp.reshape(a, (-1, 8, LANES)), 0)

        _tiles(p, tile)

    if not p.packed and p.T % p.R == 0:
        run(False)
        return
    pl.when(left >= p.R)(partial(run, False))
    pl.when(left < p.R)(partial(run, True))


def _blocks(p: ChannelGates) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    tokens = pl.BlockSpec((1, p.R, p.L), lambda c, b, t, *_: (b, t, c))
    return tokens, pl.BlockSpec((PARAMETERS, p.L), lambda c, b, t, *_: (0, c))


def _settings(p: ChannelGates) -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=p.vmem)


def channel_gates(p: ChannelGates, raw: Array, parameters: Array, *, interpret: Any = False) -> Array:
    """Log decays, float32 [B, T, channels].

    Args:
        p: the plan.
        raw: projections [B, T, channels].
        parameters: exp(A_log) and dt_bias of each channel, float32 [8, channels], the other rows unused.
    """
    tokens, few = _blocks(p)
    return pallas_call(
        partial(_values, p),
        name="gated_delta_mixer_gates",
        grid=(p.channels // p.L, p.B, -(-p.T // p.R)),
        in_specs=[tokens, few],
        out_specs=tokens,
        out_shape=result_shapes([jax.ShapeDtypeStruct(raw.shape, F32)], raw)[0],
        compiler_params=_settings(p),
        interpret=interpret,
    )(raw, parameters)


def channel_gate_gradients(
    p: ChannelGates, raw: Array, parameters: Array, end: Array, dg: Array, *, interpret: Any = False
) -> tuple[Array, Array]:
    """The cotangent of raw, in its dtype, and sums for dt_bias and A_log of each channel, float32 [16, channels], of
    which eight rows each are to be added up.

    Args:
        p: the plan.
        raw, parameters: as ``channel_gates`` takes them.
        end: [1] int32: tokens from there on are none of a sequence, and their cotangents 0.
        dg: of the log decays, float32 [B, T, channels].
    """
    tokens, few = _blocks(p)
    return pallas_call(
        partial(_gradients, p),
        name="gated_delta_mixer_gate_gradients",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.channels // p.L, p.B, -(-p.T // p.R)),
            in_specs=[tokens, tokens, few],
            out_specs=[tokens, pl.BlockSpec((SUMS, p.L), lambda c, b, t, *_: (0, c))],
        ),
        out_shape=result_shapes(
            [jax.ShapeDtypeStruct(raw.shape, raw.dtype), jax.ShapeDtypeStruct((SUMS, p.channels), F32)], raw
        ),
        compiler_params=_settings(p),
        interpret=interpret,
    )(end, raw, dg, parameters)
