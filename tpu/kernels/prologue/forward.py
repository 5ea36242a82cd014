"""Convolution, silu and l2norm of whole arrays of channels, for the backward pass, which keeps none of their values.

Blocks of tokens and channels; a block comes with the tokens before it. Each head's channels are one loop's turn.
Blocks in which a sequence begins or ends, or a row ends, are computed by a second copy of the code, with masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....spec.gates import L2_EPS
from ..common.launching import pallas_call, result_shapes
from ..common.tiles import LANES
from .plan import HALO, Prologue

__all__ = [
    "ROWS",
    "Places",
    "activated",
    "at_lanes",
    "block_specs",
    "by_heads",
    "by_part",
    "decoded",
    "fill_window",
    "head_sums",
    "of_part",
    "prologue",
    "seen",
    "tap_rows",
    "validity",
]

Array = Any
F32 = jnp.float32
#: Rows that are in registers at a time.
ROWS = 32
#: Heads whose instructions stand side by side, at most.
HEADS = 4


class Places(NamedTuple):
    """Where tokens stand in their sequences, for blocks of ``Prologue.R``.

    code: [T, 128] bfloat16, all lanes alike: tokens before a token in its sequence plus 8 times those behind it, each
        up to taps - 1; -1 outside of all sequences. Of plans without masks one block, which nobody reads.
    special: [blocks] int32, 1 where a block needs masks.
    """

    code: Array
    special: Array


def at_lanes(tile: Array) -> Any:
    """The lanes of a tile of a block of channels."""
    return pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)


def by_heads(p: Prologue, most: int, run: Callable[[list[list[tuple[int, Array]]]], None]) -> None:
    """Run for all heads of a block of channels, ``most`` at a time, whose instructions then stand side by side.

    ``run`` takes the tiles of each of these heads: their places in scratch memory, and in the block.
    """
    heads, tiles = p.L // max(p.head, LANES), p.head_tiles
    few = max(n for n in range(1, most + 1) if heads % n == 0)

    def turn(i: Array, carry: Array) -> Array:
        run([[(h * tiles + n, (i * few + h) * tiles + n) for n in range(tiles)] for h in range(few)])
        return carry

    lax.fori_loop(0, heads // few, turn, jnp.int32(0))


def head_sums(p: Prologue, tiles: Sequence[Array]) -> list[Array]:
    """For each tile [rows, 128] of a turn the sum over the lanes of each token's head, at every lane of that head."""
    if p.head >= LANES:
        return [jnp.sum(sum(tiles[1:], tiles[0]), axis=-1, keepdims=True)] * len(tiles)
    (a,) = tiles
    lane, found = lax.broadcasted_iota(jnp.int32, a.shape, 1), jnp.zeros_like(a)
    for first in range(0, LANES, p.head):
        mine = (lane >= first) & (lane < first + p.head)
        found = jnp.where(mine, jnp.sum(jnp.where(mine, a, 0.0), axis=-1, keepdims=True), found)
    return [found]


def fill_window(p: Prologue, x: Any, before: Any, window: Any, slot: Any, lanes: Any, first: Array, valid: Any) -> None:
    """One tile of a block, and the tokens before it, as float32 [HALO + R, 128]; zeros before a row, and where
    ``valid`` [R, 128], if it is given, says so."""
    halo = before[0, :, lanes].astype(F32)
    window[slot, :HALO] = jnp.where(first, jnp.zeros_like(halo), halo)
    for r in range(0, p.R, ROWS):
        rows = slice(r, min(r + ROWS, p.R))
        a = x[0, rows, lanes].astype(F32)
        window[slot, HALO + r : HALO + rows.stop] = a if valid is None else jnp.where(valid(rows), a, 0.0)


def activated(p: Prologue, taps: Sequence[Array], weight: Any, lanes: Any) -> tuple[Array, Array | None]:
    """y of the inputs that tokens see, oldest first; and with silu, whose taps are halved, 1 + tanh(z / 2)."""
    terms = [tap * weight[j : j + 1, lanes] for j, tap in enumerate(taps)]
    z = sum(terms[1:], terms[0])
    if p.bias:
        z = z + weight[p.taps : p.taps + 1, lanes]
    if not p.silu:
        return z, None
    up = 1.0 + jnp.tanh(z)
    return z * up, up


def seen(p: Prologue, window: Any, slot: Any, r: int, n: int, age: Array | None) -> list[Array]:
    """What tokens r to r + n of a window see, oldest first; ``age`` [n, 128]: tokens before them in their sequences."""
    found = []
    for back in range(p.taps - 1, -1, -1):
        a = window[slot, HALO + r - back : HALO + r - back + n]
        found.append(a if age is None or back == 0 else jnp.where(age >= back, a, 0.0))
    return found


def decoded(code: Array) -> tuple[Array, Array, Array]:
    """Tokens before and behind, and whether a token is one of a sequence, from codes."""
    code = code.astype(F32)
    behind = jnp.floor(jnp.maximum(code, 0.0) * 0.125)
    return code - 8.0 * behind, behind, code >= 0.0


def validity(p: Prologue, code: Any, block: Array) -> Callable[[slice], Array]:
    """Which tokens of some rows of a block are those of a sequence, [rows, 128]."""

    def of(rows: slice) -> Array:
        token = lax.broadcasted_iota(jnp.int32, (rows.stop - rows.start, LANES), 0) + (rows.start + block * p.R)
        return (token < p.T) & (code[0, rows].astype(F32) >= 0.0)

    return of


def _kernel(p: Prologue, special: Any, x: Any, before: Any, weight: Any, code: Any, *rest: Any) -> None:
    results, window = rest[:-1], rest[-1]
    column, block = pl.program_id(0), pl.program_id(2)

    def run(norm: bool, out: Any, masks: bool) -> None:
        valid = validity(p, code, block) if masks else None

        def heads(every: list[list[tuple[int, Array]]]) -> None:
            for slot, tile in chain(*every):
                fill_window(p, x, before, window, slot, at_lanes(tile), block == 0, valid)
            for r in range(0, p.R, ROWS):
                size = min(ROWS, p.R - r)
                age = decoded(code[0, r : r + size])[0] if masks else None
                saw = [[seen(p, window, slot, r, size, age) for slot, _ in head] for head in every]
                y = [
                    [activated(p, a, weight, at_lanes(tile))[0] for a, (_, tile) in zip(*of, strict=True)]
                    for of in zip(saw, every, strict=True)
                ]
                if norm:
                    total = [head_sums(p, [a * a for a in head]) for head in y]
                    y = [
                        [a * lax.rsqrt(b + L2_EPS) for a, b in zip(*of, strict=True)]
                        for of in zip(y, total, strict=True)
                    ]
                for a, (_, tile) in zip(chain(*y), chain(*every), strict=True):
                    out[0, r : r + size, at_lanes(tile)] = a.astype(out.dtype)

        by_heads(p, HEADS, heads)

    by_part(p, column, special[block], results, run)


def by_part(p: Prologue, column: Array, special: Array, refs: Sequence[Any], run: Callable[..., None]) -> None:
    """Run the code of the part that a block of channels belongs to, with masks where the block is special."""
    for i, (part, ref) in enumerate(zip(p.parts, refs, strict=True)):
        inside = (column >= p.first(i)) & (column < p.first(i) + part.channels // p.L)
        if p.masks:
            pl.when(inside & (special != 0))(partial(run, part.norm, ref, True))
            inside &= special == 0
        pl.when(inside)(partial(run, part.norm, ref, False))


def of_part(p: Prologue, i: int, reverse: bool = False) -> pl.BlockSpec:
    """Blocks of the array of one part, which stay where they are while another part's channels are computed."""
    first, count = p.first(i), p.parts[i].channels // p.L

    def place(c: Array, b: Array, t: Array, special: Any) -> tuple[Array, Array, Array]:
        del special
        t = p.blocks - 1 - t if reverse else t
        begin, end = (p.blocks - 1, 0) if reverse else (0, p.blocks - 1)
        ahead, over = c < first, c >= first + count
        row = jnp.where(ahead, 0, jnp.where(over, p.B - 1, b))
        block = jnp.where(ahead, begin, jnp.where(over, end, t))
        return row, block, jnp.clip(c - first, 0, count - 1)

    return pl.BlockSpec((1, p.R, p.L), place)


def block_specs(p: Prologue, reverse: bool = False) -> dict[str, pl.BlockSpec]:
    """The blocks of x, the tokens before a block of it, the taps, and the codes."""
    where = (lambda t: p.blocks - 1 - t) if reverse else (lambda t: t)
    halos = p.R // HALO
    return {
        "x": pl.BlockSpec((1, p.R, p.L), lambda c, b, t, _: (b, where(t), c)),
        "before": pl.BlockSpec((1, HALO, p.L), lambda c, b, t, _: (b, jnp.maximum(where(t) * halos - 1, 0), c)),
        "weight": pl.BlockSpec((tap_rows(p), p.L), lambda c, b, t, _: (0, c)),
        "code": pl.BlockSpec((1, p.R, LANES), lambda c, b, t, _: (0, where(t) if p.masks else 0, 0)),
    }


def tap_rows(p: Prologue) -> int:
    """Rows of the array of taps, the bias behind them: whole tiles."""
    return -(-(p.taps + 1) // 8) * 8


def prologue(
    p: Prologue, x: Array, weight: Array, places: Places, dtypes: Mapping[str, Any], *, interpret: Any = False
) -> dict[str, Array]:
    """The rule's inputs [B, T, channels of the part] of the parts that are named.

    Args:
        p: the plan.
        x: the raw channels [B, T, p.channels].
        weight: taps, oldest first, and the bias, in float32 [tap_rows, channels]; halved where silu follows.
        places: of the tokens.
        dtypes: of the results, by the names of those parts that are wanted; these are the first ones.
    """
    few = p._replace(parts=tuple(part for part in p.parts if part.name in dtypes))
    specs = block_specs(few)
    out = pallas_call(
        partial(_kernel, few),
        name="gated_delta_mixer_prologue",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(few.columns, p.B, p.blocks),
            in_specs=[specs[name] for name in ("x", "before", "weight", "code")],
            out_specs=[of_part(few, i) for i in range(len(few.parts))],
            scratch_shapes=[pltpu.VMEM((HEADS * p.head_tiles, HALO + few.R, LANES), F32)],
        ),
        out_shape=result_shapes(
            [jax.ShapeDtypeStruct((p.B, p.T, part.channels), dtypes[part.name]) for part in few.parts], x
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=p.vmem
        ),
        interpret=interpret,
    )(places.special, x, x, weight, places.code[None])
    return dict(zip((part.name for part in few.parts), out, strict=True))
