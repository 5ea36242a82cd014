"""Cotangents of convolution, silu and l2norm: the raw channels and the rule's cotangents are read once.

Blocks of tokens run from a row's last to its first, so that what later tokens hand to the tokens that they see is
there. With y = silu(z), z = bias + sum_j w_j x_{t - (W - 1) + j}, n = y r, r = (sum y^2 + eps)^-1/2 over a head:

    dy = r (dn - n sum n dn)        dz = dy (1 + tanh + y (1 - tanh)) / 2, tanh of z / 2
    dx_t = sum_j w_j dz_{t + (W - 1) - j}        dw_j = sum_t dz_t x_{t - (W - 1) + j}

Taps are halved where silu follows, and dz is kept doubled: the halves cancel in dx, and the caller halves dw.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....spec.gates import L2_EPS
from ..common.launching import pallas_call, result_shapes
from ..common.tiles import LANES
from .forward import (
    F32,
    Places,
    activated,
    at_lanes,
    block_specs,
    by_heads,
    by_part,
    decoded,
    fill_window,
    head_sums,
    of_part,
    seen,
    validity,
)
from .plan import HALO, Prologue

__all__ = ["prologue_gradients"]

Array = Any
#: Rows of a tile of float32: so many tokens' dz are handed to the block before.
LATER = 8
#: Rows that are in registers at a time, and heads side by side.
ROWS, HEADS = 64, 2


def _kernel(p: Prologue, special: Any, x: Any, before: Any, weight: Any, code: Any, *rest: Any) -> None:
    n_parts = len(p.parts)
    cotangents, (dx, sums), (window, dz, later) = rest[:n_parts], rest[n_parts : n_parts + 2], rest[n_parts + 2 :]
    column, row, step = (pl.program_id(i) for i in range(3))
    block = p.blocks - 1 - step

    @pl.when((row == 0) & (step == 0))
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, F32)

    @pl.when(step == 0)
    def _() -> None:
        later[...] = jnp.zeros(later.shape, F32)

    def run(norm: bool, dn: Any, masks: bool) -> None:
        valid = validity(p, code, block) if masks else None
        chunks = [(r, min(ROWS, p.R - r)) for r in reversed(range(0, p.R, ROWS))]

        def heads(every: list[list[tuple[int, Array]]]) -> None:
            tiles = [(slot, tile, at_lanes(tile)) for slot, tile in chain(*every)]
            for slot, tile, lanes in tiles:
                fill_window(p, x, before, window, slot, lanes, block == 0, valid)
                dz[slot, p.R :] = later[tile]
            total = {slot: [jnp.zeros((8, LANES), F32)] * p.sums for slot, *_ in tiles}
            for r, size in chunks:
                rows, age, behind, inside = slice(r, r + size), None, None, None
                if valid is not None:
                    age, behind, _ = decoded(code[0, rows])
                    inside = valid(rows) & (age >= p.taps - 1) if p.skip else valid(rows)
                saw = [seen(p, window, slot, r, size, age) for slot, *_ in tiles]
                values = [activated(p, a, weight, lanes) for a, (*_, lanes) in zip(saw, tiles, strict=True)]
                d = [dn[0, rows, lanes].astype(F32) for *_, lanes in tiles]
                if norm:
                    d = _through_norm(p, [y for y, _ in values], d)
                for (slot, *_), (y, up), a, taps in zip(tiles, values, d, saw, strict=True):
                    if up is not None:
                        a = a * (up + y * (2.0 - up))
                    a = a if inside is None else jnp.where(inside, a, 0.0)
                    dz[slot, rows] = a
                    for j, term in enumerate([*(a * tap for tap in taps), *([a] if p.bias else [])]):
                        total[slot][j] = total[slot][j] + jnp.sum(jnp.reshape(term, (-1, 8, LANES)), 0)
                for slot, _, lanes in tiles:
                    terms = []
                    for back in range(p.taps):
                        a = dz[slot, r + back : r + back + size]
                        if behind is not None and back:
                            a = jnp.where(behind >= back, a, 0.0)
                        terms.append(a * weight[p.taps - 1 - back : p.taps - back, lanes])
                    dx[0, rows, lanes] = sum(terms[1:], terms[0]).astype(dx.dtype)
            for slot, tile, lanes in tiles:
                later[tile] = dz[slot, :LATER]
                for j, a in enumerate(total[slot]):
                    sums[j * 8 : (j + 1) * 8, lanes] += a

        by_heads(p, HEADS, heads)

    by_part(p, column, special[block], cotangents, run)


def _through_norm(p: Prologue, y: Sequence[Array], d: Sequence[Array]) -> list[Array]:
    """Cotangents of y from those of y / |y|, tiles of heads side by side."""
    n = p.head_tiles
    heads = range(0, len(y), n)
    by_head = lambda tiles: [a for i in heads for a in head_sums(p, tiles[i : i + n])]  # noqa: E731
    scale = [lax.rsqrt(a + L2_EPS) for a in by_head([a * a for a in y])]
    unit = [a * b for a, b in zip(y, scale, strict=True)]
    along = by_head([a * b for a, b in zip(unit, d, strict=True)])
    return [a * (b - u * c) for a, b, u, c in zip(scale, d, unit, along, strict=True)]


def prologue_gradients(
    p: Prologue, x: Array, weight: Array, places: Places, cotangents: Sequence[Array], *, interpret: Any = False
) -> tuple[Array, Array]:
    """dx [B, T, channels] in x's dtype, and the sums for taps and bias, float32 [p.sums * 8, channels], of which
    eight rows each are to be added up (and halved with silu).

    Args:
        p: the plan.
        x, weight, places: as ``prologue`` takes them.
        cotangents: of each part's output [B, T, channels of the part], bfloat16 or float32.
    """
    specs = block_specs(p, reverse=True)
    return pallas_call(
        partial(_kernel, p),
        name="gated_delta_mixer_prologue_gradients",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.columns, p.B, p.blocks),
            in_specs=[
                *(specs[name] for name in ("x", "before", "weight", "code")),
                *(of_part(p, i, reverse=True) for i in range(len(p.parts))),
            ],
            out_specs=[specs["x"], pl.BlockSpec((p.sums * 8, p.L), lambda c, b, t, _: (0, c))],
            scratch_shapes=[
                pltpu.VMEM((HEADS * p.head_tiles, HALO + p.R, LANES), F32),
                pltpu.VMEM((HEADS * p.head_tiles, p.R + LATER, LANES), F32),
                pltpu.VMEM((p.L // LANES, LATER, LANES), F32),
            ],
        ),
        out_shape=result_shapes(
            [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((p.sums * 8, p.channels), F32)], x
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=p.vmem
        ),
        interpret=interpret,
    )(places.special, x, x, weight, places.code[None], *cotangents)
