"""The forward kernel of the scalar-gated rule: one grid step is one chunk of one group of heads.

Grid: (groups of heads, chunks), chunks innermost and in order, since the state goes from one to the next in VMEM
scratch. A table in scalar memory (``..table``) says which block of tokens a chunk lies in, which of its rows count and
which state it belongs to; the same kernel serves rows of a batch and packed sequences.

Blocks, of C tokens and P key heads (P R value heads):

| operand | in HBM | block |
|---|---|---|
| q, k | [B, T, H K] | [1, C, P K] |
| v, o | [B, T, HV V] | [1, C, P R V] |
| g, b | [B, groups, T, P R] float32 | [1, 1, C, P R] |
| states | [N, HV, K, V] float32 | [1, P R, K, V] |

Tokens stand before heads as in the caller's arrays, heads side by side in the lanes: that is a reshape and no copy, as
projections produce it, and heads are cut apart by lane slices (free where K and V are multiples of 128). Heads first
would want every operand and the output transposed in HBM. Only the gates are copied, a K-th of the traffic: a few of HV
lanes are no legal block. Nothing is padded: the last block of a row may reach beyond T, and rows outside the chunk,
which belong to others or to nobody, are masked when they are read and kept when the output is written.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import table as tb
from ..plan import Plan
from . import stages as kernel_stages
from .dot import KernelProduct

__all__ = ["PROBED", "forward"]

Array = Any

#: What a probe returns beside o and the states, in order; each [chunks, HV, rows, columns] float32.
PROBED = ("G", "count", "Akk", "Aqk", "T", "U", "W", "S", "after", "Vn", "o")


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    b: Any
    before: Any
    o: Any
    after: Any


def _kernel(p: Plan, stages: Any, table: Any, *refs: Any) -> None:
    x, probes, S = _Refs(*refs[:8]), refs[8:-1], refs[-1]
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


def _chunk(p: Plan, stages: Any, x: _Refs, probes: Any, S: Any, begin: Array, end: Array) -> None:
    mm = KernelProduct(p.precision)

    def counts(width: int) -> Array:
        row = lax.broadcasted_iota(jnp.int32, (p.C, width), 0)
        return (row >= begin) & (row < end)

    def heads(ref: Any, number: int, width: int, of: int) -> Array:
        """Heads of a block [1, C, number * width] as float32 [P, number / P, C, width], rows outside the chunk 0."""
        keep = counts(width)
        parts = [ref[0, :, i * width : (i + 1) * width].astype(jnp.float32) for i in range(number)]
        return jnp.reshape(jnp.stack([jnp.where(keep, a, 0.0) for a in parts]), (p.P, of, p.C, width))

    def columns(a: Array) -> Array:
        """[C, heads] as [P, R, C, 1]."""
        return jnp.reshape(jnp.stack([a[:, i : i + 1] for i in range(p.heads)]), (p.P, p.R, p.C, 1))

    q, k, v = heads(x.q, p.P, p.K, 1), heads(x.k, p.P, p.K, 1), heads(x.v, p.heads, p.V, p.R)
    gates = [jnp.where(counts(p.heads), ref[0, 0], 0.0) for ref in (x.g, x.b)]
    G, count = map(columns, stages.decay(gates[0]))
    b = columns(gates[1])
    before = jnp.reshape(S[...], (p.P, p.R, p.K, p.V))

    Akk, Aqk = stages.scores(mm, q, k, b, G, count, p.scale)
    T = stages.inverse(mm, Akk)
    Vn = stages.delta(mm, T, k, v, b, b, G, count, before)
    o = stages.output(mm, q, Aqk, Vn, G, count, before, p.scale)
    after = stages.state(mm, k, Vn, G, count, before)

    S[...] = jnp.reshape(after, S.shape)
    keep = counts(p.V)
    out = jnp.reshape(o, (p.heads, p.C, p.V))
    for i in range(p.heads):
        lanes = slice(i * p.V, (i + 1) * p.V)
        x.o[0, :, lanes] = jnp.where(keep, out[i], x.o[0, :, lanes].astype(jnp.float32)).astype(x.o.dtype)
    if probes:
        U, W = stages.wy(mm, T, k, v, b, b, G, count)
        found = (G, count, Akk, Aqk, T, U, W, before, after, Vn, o)
        for ref, value in zip(probes, found, strict=True):
            ref[0] = jnp.reshape(value, ref.shape[1:])


def forward(
    p: Plan,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    S: Array,
    cu_seqlens: Array | None,
    *,
    interpret: Any = False,
    stages: ModuleType | Any = kernel_stages,
    probe: bool = False,
) -> tuple[Array, Array, dict[str, Array]]:
    """The bare rule by the kernel.

    Args:
        p: the plan.
        q, k: [B, T, H, K] bfloat16, or float32 for "highest".
        v: [B, T, HV, V] bfloat16 or float32, the dtype of o.
        g, b: log decay and erase and write gate, [B, T, HV] float32.
        S: states that the sequences start from, [N, HV, K, V] float32.
        cu_seqlens: [N + 1] or None.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.
        stages: the functions that the kernel is made of.
        probe: also return each chunk's stages.

    Returns:
        o [B, T, HV, V], final states, and the probed values by name (empty unless asked for); a probe's chunks are
        those of the table.
    """
    table = tb.chunk_table(p, cu_seqlens)
    HV = p.H * p.R
    gates = [jnp.swapaxes(jnp.reshape(a, (p.B, p.T, p.groups, p.heads)), 1, 2) for a in (g, b)]
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731

    def place(c: Any, t: Any) -> tuple[Any, Any]:
        block = t[c * tb.WORDS + tb.BLOCK]
        return lax.div(block, jnp.int32(p.blocks)), lax.rem(block, jnp.int32(p.blocks))

    def tokens(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return (*place(c, t), h)

    def gate(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        row, block = place(c, t)
        return row, h, block, 0

    def slot(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return t[c * tb.WORDS + tb.SLOT], h, 0, 0

    keys = pl.BlockSpec((1, p.C, p.P * p.K), tokens)
    values = pl.BlockSpec((1, p.C, p.heads * p.V), tokens)
    column = pl.BlockSpec((1, 1, p.C, p.heads), gate)
    states = pl.BlockSpec((1, p.heads, p.K, p.V), slot)
    inner = _probe_shapes(p) if probe else []
    out = pl.pallas_call(
        partial(_kernel, p, stages),
        name="gated_delta_rule_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.groups, p.chunks),
            in_specs=[keys, keys, values, column, column, states],
            out_specs=[
                values,
                states,
                *(pl.BlockSpec((1, p.heads, *shape), lambda h, c, t: (c, h, 0, 0)) for shape in inner),
            ],
            scratch_shapes=[pltpu.VMEM((p.heads, p.K, p.V), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((p.B, p.T, HV * p.V), v.dtype),
            jax.ShapeDtypeStruct(S.shape, jnp.float32),
            *(jax.ShapeDtypeStruct((p.chunks, HV, *shape), jnp.float32) for shape in inner),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=None if p.vmem < 8 << 20 else 2 * p.vmem if probe else p.vmem + (8 << 20),
        ),
        interpret=interpret,
    )(table, flat(q), flat(k), flat(v), *gates, S)
    return jnp.reshape(out[0], (p.B, p.T, HV, p.V)), out[1], dict(zip(PROBED if probe else (), out[2:], strict=True))


def _probe_shapes(p: Plan) -> list[tuple[int, int]]:
    """[rows, columns] a head of what ``PROBED`` names."""
    column, square, keys, values, state = (p.C, 1), (p.C, p.C), (p.C, p.K), (p.C, p.V), (p.K, p.V)
    return [column, column, square, square, square, values, keys, state, state, values, values]
