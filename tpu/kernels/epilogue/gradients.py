"""The cotangents of a mixer's output norm and gate, of rows and packed sequences, whichever kernel the rule has.

Blocks of tokens and heads; each is read and written once. What the norm gives to its weight is summed over tokens, in
eight rows, and over the heads of a column of blocks, and added up by XLA afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..common.gradients import NormOperands
from ..common.launching import pallas_call, result_shapes
from ..common.norm import norm_gradients
from ..common.registers import F32, iota
from ..common.tiles import LANES
from .plan import Epilogue

__all__ = ["epilogue_gradients"]

Array = Any
#: Rows that are in registers at a time.
ROWS = 32


def _kernel(p: Epilogue, end: Any, o: Any, dy: Any, weight: Any, *rest: Any) -> None:
    z, d_o, dz, sums = (rest[0], rest[1], rest[2], rest[3]) if len(rest) == 4 else (None, rest[0], None, rest[1])
    row, block = pl.program_id(1), pl.program_id(2)
    left = (end[0] if p.packed else p.T) - block * p.R  # tokens of sequences in this block and behind it

    @pl.when((row == 0) & (block == 0))
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, F32)

    def run(masks: bool) -> None:
        def head(i: Array, carry: Array) -> Array:
            lanes = pl.ds(pl.multiple_of(i * p.V, LANES), p.V)
            total = carry
            for first in range(0, p.R, ROWS):
                rows = slice(first, min(first + ROWS, p.R))
                given = [a[0, rows, lanes].astype(F32) for a in (o, dy, *(() if z is None else (z,)))]
                if masks:
                    there = iota(given[0].shape, 0) + first < left
                    given = [jnp.where(there, a, 0.0) for a in given]
                found = norm_gradients(p.norm, given[0], weight[...], None if z is None else given[2], given[1])
                d_o[0, rows, lanes] = found.o.astype(d_o.dtype)
                if dz is not None:
                    dz[0, rows, lanes] = found.z.astype(dz.dtype)  # type: ignore[union-attr]
                total = total + jnp.sum(jnp.reshape(found.weight, (-1, 8, p.V)), 0)
            return total

        sums[0] += lax.fori_loop(0, p.L // p.V, head, jnp.zeros((8, p.V), F32))

    if not p.packed and p.T % p.R == 0:
        run(False)
        return
    pl.when(left >= p.R)(partial(run, False))
    pl.when(left < p.R)(partial(run, True))


def epilogue_gradients(
    p: Epilogue, x: NormOperands, dy: Array, end: Array, *, dtype: Any, interpret: Any = False
) -> tuple[Array, Array | None, Array]:
    """The cotangents of o, in ``dtype``, of z, in its dtype, or None, and of the weight [V] float32.

    Args:
        p: the plan.
        x: what the norm read.
        dy: the cotangent of the normed output [B, T, HV V].
        end: [1] int32: tokens from there on are none of a packed sequence, and count for nothing.
        dtype: of the cotangent of o.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.
    """
    o, z, weight = x
    tokens = pl.BlockSpec((1, p.R, p.L), lambda c, b, t, *_: (b, t, c))
    columns, gates = p.channels // p.L, [] if z is None else [z]
    shape = jax.ShapeDtypeStruct
    made = [shape(o.shape, dtype), *(shape(a.shape, a.dtype) for a in gates), shape((columns, 8, p.V), F32)]
    out = pallas_call(
        partial(_kernel, p),
        name="gated_delta_mixer_norm_gradients",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(columns, p.B, -(-p.T // p.R)),
            in_specs=[tokens, tokens, pl.BlockSpec((1, p.V), lambda c, b, t, *_: (0, 0)), *[tokens] * len(gates)],
            out_specs=[tokens, *[tokens] * len(gates), pl.BlockSpec((1, 8, p.V), lambda c, b, t, *_: (c, 0, 0))],
        ),
        out_shape=result_shapes(made, o),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=p.vmem
        ),
        interpret=interpret,
    )(end, o, dy, weight[None], *gates)
    return out[0], None if z is None else out[1], jnp.sum(out[-1], (0, 1)) * p.V**0.5
