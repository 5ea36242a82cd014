"""The forward kernel of every variant: one grid step is one chunk of one group of heads.

Grid: (groups of heads, chunks), chunks innermost and in order, since the state goes from one to the next in VMEM
scratch. A table in scalar memory (``..table``) says which block of tokens a chunk lies in, which of its rows count and
which state it belongs to; the same kernel serves rows of a batch and packed sequences.

Blocks, of C tokens and P key heads (P R value heads):

| operand | in HBM | block |
|---|---|---|
| q, k | [B, T, H K] | [1, C, P K] |
| v, o | [B, T, HV V] | [1, C, P R V] |
| g, b, w, n a head | [B, T, HV n] float32 | [1, C, P R n] |
| the same, if not whole lanes | [B, groups, T, P R n] float32 | [1, 1, C, P R n] |
| states | [N, HV, K, V] float32 | [1, P R, K, V] |

Tokens stand before heads as in the caller's arrays, heads side by side in the lanes: that is a reshape and no copy, as
projections produce it, and heads are cut apart by lane slices (free where K and V are multiples of 128). Heads first
would want every operand and the output transposed in HBM. Only gates of a head are copied, a K-th of the traffic: a few
of HV lanes are no legal block. Gates that a variant does not have are no operands. Nothing is padded: the last block of
a row may reach beyond T, and rows outside the chunk, which belong to others or to nobody, are masked when they are read
and kept when the output is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ... import table as tb
from ..common.launching import _result_shapes as result_shapes
from ..common.launching import pallas_call
from ..common.products import KernelProduct
from . import stages as kernel_stages
from .plan import Plan
from .rows import Rows, gate_block

__all__ = ["PROBED", "forward"]

Array = Any

#: What a probe may return beside o and the states; each [chunks, HV, rows, columns] float32.
PROBED = ("G", "count", "Akk", "Aqk", "T", "U", "W", "S", "after", "Vn", "o")


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    gates: tuple[Any, ...]
    before: Any
    o: Any
    after: Any


def _kernel(p: Plan, stages: Any, probe: tuple[str, ...], table: Any, *refs: Any) -> None:
    n = 3 + len(p.widths.given)
    x, S = _Refs(*refs[:3], refs[3:n], *refs[n : n + 3]), refs[-1]
    probes = dict(zip(probe, refs[n + 3 : -1], strict=True))
    entry = pl.program_id(1) * tb.WORDS
    begin, end, flags = table[entry + tb.BEGIN], table[entry + tb.END], table[entry + tb.FLAGS]

    @pl.when(flags & tb.FIRST != 0)
    def _() -> None:
        S[...] = x.before[0]

    @pl.when(flags & tb.FRESH != 0)
    def _() -> None:
        x.o[...] = jnp.zeros(x.o.shape, x.o.dtype)

    @pl.when(begin < end)
    def _() -> None:
        _chunk(p, stages, x, probes, S, begin, end)

    @pl.when(flags & tb.LAST != 0)
    def _() -> None:
        x.after[0] = S[...]


def _chunk(p: Plan, stages: Any, x: _Refs, probes: dict[str, Any], S: Any, begin: Array, end: Array) -> None:
    mm = KernelProduct(p.precision)

    rows = Rows(p, begin, end)
    q, k, v = rows.heads(x.q, p.P, p.K, 1), rows.heads(x.k, p.P, p.K, 1), rows.heads(x.v, p.heads, p.V, p.R)
    given = [rows.head(ref, 0, p.heads * n) for ref, n in zip(x.gates, p.widths.given, strict=True)]
    G, count = (rows.by_head(a, p.widths.decay) for a in stages.decay(given.pop(0)))
    b = rows.by_head(given.pop(0), p.widths.erase) if p.widths.erase else None
    w = b if p.widths.shared else rows.by_head(given.pop(0), p.widths.write) if p.widths.write else None
    before = jnp.reshape(S[...], (p.P, p.R, p.K, p.V))

    Akk, Aqk = stages.scores(mm, q, k, b, G, count, p.scale)
    T = None if Akk is None else stages.inverse(mm, Akk)
    Vn = stages.delta(mm, T, k, v, b, w, G, count, before)
    o = stages.output(mm, q, Aqk, Vn, G, count, before, p.scale)
    after = stages.state(mm, k, Vn, G, count, before)

    S[...] = jnp.reshape(after, S.shape)
    rows.put(x.o, o, p.V)
    if probes:
        U, W = stages.wy(mm, T, k, v, b, w, G, count) if "U" in probes else (None, None)
        found = dict(zip(PROBED, (G, count, Akk, Aqk, T, U, W, before, after, Vn, o), strict=True))
        for name, ref in probes.items():
            ref[0] = jnp.reshape(found[name], ref.shape[1:])


def forward(
    p: Plan,
    q: Array,
    k: Array,
    v: Array,
    gates: Sequence[Array],
    S: Array,
    cu_seqlens: Array | None,
    *,
    interpret: Any = False,
    stages: ModuleType | Any = kernel_stages,
    probe: tuple[str, ...] = (),
) -> tuple[Array, Array, dict[str, Array]]:
    """The bare rule by the kernel.

    Args:
        p: the plan.
        q, k: [B, T, H, K] bfloat16, or float32 for "highest".
        v: [B, T, HV, V] bfloat16 or float32, the dtype of o.
        gates: log decay, and erase and write gate where they are given, [B, T, HV, width] float32; one for both where
            they are shared.
        S: states that the sequences start from, [N, HV, K, V] float32.
        cu_seqlens: [N + 1] or None.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.
        stages: the functions that the kernel is made of.
        probe: names of ``PROBED``, of values of each chunk to be returned too.

    Returns:
        o [B, T, HV, V], final states, and the probed values by name, of those that there are, [chunks, HV, ...];
        chunks are those of the table.
    """
    table = tb.chunk_table(p, cu_seqlens)
    HV = p.H * p.R
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731

    def place(c: Any, t: Any) -> tuple[Any, Any]:
        block = t[c * tb.WORDS + tb.BLOCK]
        return lax.div(block, jnp.int32(p.blocks)), lax.rem(block, jnp.int32(p.blocks))

    def tokens(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return (*place(c, t), h)

    def column(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        row, block = place(c, t)
        return row, h, block, 0

    def slot(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return t[c * tb.WORDS + tb.SLOT], h, 0, 0

    keys = pl.BlockSpec((1, p.C, p.P * p.K), tokens)
    values = pl.BlockSpec((1, p.C, p.heads * p.V), tokens)
    given = [gate_block(p, a, n, tokens, column) for a, n in zip(gates, p.widths.given, strict=True)]
    states = pl.BlockSpec((1, p.heads, p.K, p.V), slot)
    inner = {name: shape for name, shape in _probe_shapes(p).items() if name in probe}
    out = pallas_call(
        partial(_kernel, p, stages, tuple(inner)),
        name="gated_delta_rule_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.groups, p.chunks),
            in_specs=[keys, keys, values, *(spec for _, spec in given), states],
            out_specs=[
                values,
                states,
                *(pl.BlockSpec((1, p.heads, *shape), lambda h, c, t: (c, h, 0, 0)) for shape in inner.values()),
            ],
            scratch_shapes=[pltpu.VMEM((p.heads, p.K, p.V), jnp.float32)],
        ),
        out_shape=result_shapes(
            [
                jax.ShapeDtypeStruct((p.B, p.T, HV * p.V), v.dtype),
                jax.ShapeDtypeStruct(S.shape, jnp.float32),
                *(jax.ShapeDtypeStruct((p.chunks, HV, *shape), jnp.float32) for shape in inner.values()),
            ],
            q,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=None if p.vmem < 8 << 20 else 2 * p.vmem if len(probe) > 1 else p.vmem + (8 << 20),
        ),
        interpret=interpret,
    )(table, flat(q), flat(k), flat(v), *(a for a, _ in given), S)
    return jnp.reshape(out[0], (p.B, p.T, HV, p.V)), out[1], dict(zip(inner, out[2:], strict=True))


def _probe_shapes(p: Plan) -> dict[str, tuple[int, int]]:
    """[rows, columns] a head of what ``PROBED`` names and the variant has."""
    decay, square, keys, values, state = (p.C, p.widths.decay), (p.C, p.C), (p.C, p.K), (p.C, p.V), (p.K, p.V)
    shapes = (decay, decay, square, square, square, values, keys, state, state, values, values)
    missing = () if p.widths.erase else ("Akk", "T", "W")
    return {name: shape for name, shape in zip(PROBED, shapes, strict=True) if name not in missing}
