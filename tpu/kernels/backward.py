"""The backward kernel of the scalar-gated rule: the grid of ``forward``, its chunks in reverse.

The cotangent of the state goes from one chunk to the one before it in VMEM scratch; the state at each chunk's start was
kept by the forward pass, and everything else of the chunk is computed again. Blocks are those of the forward kernel:
the gradients of q, k, v in HBM as [B, T, heads * channels], those of gates as [B, groups, T, P R], of states as
[N, HV, K, V]. A key head's gradients are summed over its value heads before they leave the chip.
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

from ...spec.stages import RESET
from .. import table as tb
from ..plan import Plan
from . import stages as kernel_stages
from .dot import KernelProduct
from .gradients import chunk_gradients
from .rows import Rows

__all__ = ["RuleGradients", "backward"]

Array = Any


class RuleGradients(NamedTuple):
    """Cotangents of the bare rule's operands, in the shapes that ``forward.forward`` takes them."""

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array
    S: Array


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    b: Any
    S: Any
    dO: Any
    dS_after: Any
    dq: Any
    dk: Any
    dv: Any
    dg: Any
    db: Any
    dS_before: Any
    dS: Any


def _kernel(p: Plan, stages: Any, table: Any, *refs: Any) -> None:
    x = _Refs(*refs)
    chunk = p.chunks - 1 - pl.program_id(1)
    entry = chunk * tb.WORDS
    begin, end, flags = table[entry + tb.BEGIN], table[entry + tb.END], table[entry + tb.FLAGS]
    following = jnp.minimum(chunk + 1, p.chunks - 1) * tb.WORDS

    @pl.when(flags & tb.LAST != 0)
    def _() -> None:
        x.dS[...] = x.dS_after[0]

    @pl.when((chunk == p.chunks - 1) | (table[following + tb.BLOCK] != table[entry + tb.BLOCK]))
    def _() -> None:  # the first visit of a block in this order
        for ref in (x.dq, x.dk, x.dv, x.dg, x.db):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(begin < end)
    def _() -> None:
        _chunk(p, stages, x, begin, end)

    @pl.when(flags & tb.FIRST != 0)
    def _() -> None:
        x.dS_before[0] = x.dS[...]


def _chunk(p: Plan, stages: Any, x: _Refs, begin: Array, end: Array) -> None:
    rows = Rows(p, begin, end)

    def put_columns(ref: Any, a: Array) -> None:
        a, lane = jnp.reshape(a, (p.heads, p.C, 1)), lax.broadcasted_iota(jnp.int32, (p.C, p.heads), 1)
        for i in range(p.heads):
            ref[0, 0] = jnp.where(rows.own(p.heads) & (lane == i), a[i], ref[0, 0])

    g, b = (jnp.where(rows.own(p.heads), ref[0, 0], 0.0) for ref in (x.g, x.b))
    G, count = (rows.by_head(a, 1) for a in stages.decay(g))
    state = lambda a: jnp.reshape(a, (p.P, p.R, p.K, p.V))  # noqa: E731
    d = chunk_gradients(
        KernelProduct(p.precision),
        stages,
        rows.heads(x.q, p.P, p.K, 1),
        rows.heads(x.k, p.P, p.K, 1),
        rows.heads(x.v, p.heads, p.V, p.R),
        rows.by_head(b, 1),
        G,
        count,
        rows.by_head(g, 1) < RESET,
        state(x.S[0]),
        p.scale,
        rows.heads(x.dO, p.heads, p.V, p.R),
        state(x.dS[...]),
    )
    for ref, a, width in ((x.dq, d.q, p.K), (x.dk, d.k, p.K), (x.dv, d.v, p.V)):
        rows.put(ref, a, width)
    put_columns(x.dg, d.g)
    put_columns(x.db, d.b)
    x.dS[...] = jnp.reshape(d.S, x.dS.shape)


def backward(
    p: Plan,
    q: Array,
    k: Array,
    v: Array,
    gates: Sequence[Array],
    S: Array,
    dO: Array,
    dS: Array,
    cu_seqlens: Array | None,
    *,
    dtypes: tuple[Any, Any],
    interpret: Any = False,
    stages: ModuleType | Any = kernel_stages,
) -> RuleGradients:
    """Cotangents of the bare rule's operands.

    Args:
        p: the plan of the backward kernel.
        q, k, v, gates, cu_seqlens: as ``forward.forward`` takes them.
        S: states at the starts of the table's chunks, [chunks, HV, K, V] float32: ``forward``'s probe "S", chunks of
            p.C tokens.
        dO: cotangent of the output [B, T, HV, V]; dS: of the final states [N, HV, K, V] float32.
        dtypes: of the gradients of q and k, and of v.
    """
    table = tb.chunk_table(p, cu_seqlens)
    HV = p.H * p.R
    grouped = lambda a: jnp.swapaxes(jnp.reshape(a, (p.B, p.T, p.groups, p.heads)), 1, 2)  # noqa: E731
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731

    def place(c: Any, t: Any) -> tuple[Any, Any]:
        block = t[(p.chunks - 1 - c) * tb.WORDS + tb.BLOCK]
        return lax.div(block, jnp.int32(p.blocks)), lax.rem(block, jnp.int32(p.blocks))

    def tokens(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return (*place(c, t), h)

    def gate(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        row, block = place(c, t)
        return row, h, block, 0

    def slot(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return t[(p.chunks - 1 - c) * tb.WORDS + tb.SLOT], h, 0, 0

    keys = pl.BlockSpec((1, p.C, p.P * p.K), tokens)
    values = pl.BlockSpec((1, p.C, p.heads * p.V), tokens)
    column = pl.BlockSpec((1, 1, p.C, p.heads), gate)
    states = pl.BlockSpec((1, p.heads, p.K, p.V), slot)
    kept = pl.BlockSpec((1, p.heads, p.K, p.V), lambda h, c, t: (p.chunks - 1 - c, h, 0, 0))
    rows, given = (lambda width, of: jax.ShapeDtypeStruct((p.B, p.T, width), of)), [grouped(a) for a in gates]
    dq, dk, dv, dg, db, dS0 = pl.pallas_call(
        partial(_kernel, p, stages),
        name="gated_delta_rule_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.groups, p.chunks),
            in_specs=[keys, keys, values, column, column, kept, values, states],
            out_specs=[keys, keys, values, column, column, states],
            scratch_shapes=[pltpu.VMEM((p.heads, p.K, p.V), jnp.float32)],
        ),
        out_shape=[
            *[rows(p.H * p.K, dtypes[0])] * 2,
            rows(HV * p.V, dtypes[1]),
            *[jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (*given, dS)],
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=None if p.vmem < 8 << 20 else p.vmem + (8 << 20),
        ),
        interpret=interpret,
    )(table, flat(q), flat(k), flat(v), *given, S, flat(dO), dS)
    heads = lambda a, width: jnp.reshape(a, (p.B, p.T, -1, width))  # noqa: E731
    per_head = lambda a: jnp.reshape(jnp.swapaxes(a, 1, 2), (p.B, p.T, HV))  # noqa: E731
    return RuleGradients(heads(dq, p.K), heads(dk, p.K), heads(dv, p.V), per_head(dg), per_head(db), dS0)
