"""The backward kernel of every variant: the grid of ``forward``, its chunks in reverse.

The cotangent of the state goes from one chunk to the one before it in VMEM scratch; the state at each chunk's start was
kept by the forward pass, and everything else of the chunk is computed again. Blocks are those of the forward kernel,
those of gradients as those of their operands. A key head's gradients are summed over its value heads before they leave
the chip. A chunk of a rule with one decay and gate a head is ``gradients``', of any other ``channel_gradients``'.
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

from ....spec.stages import RESET
from ... import table as tb
from ..common.gate_widths import ONE_GATE
from ..common.launching import _result_shapes as result_shapes
from ..common.launching import pallas_call
from ..common.products import KernelProduct
from . import stages as kernel_stages
from .channel_gradients import HeadOperands, Solved, by_head, decay_factors, gradients, scores
from .head_gradients import chunk_gradients
from .plan import Plan
from .rows import Rows, gate_block, gates_by_token

__all__ = ["RuleGradients", "backward"]

Array = Any


class RuleGradients(NamedTuple):
    """Cotangents of the bare rule's operands, in the shapes that ``forward.forward`` takes them."""

    q: Array
    k: Array
    v: Array
    gates: tuple[Array, ...]
    S: Array


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    gates: tuple[Any, ...]
    kept: dict[str, Any]
    dO: Any
    dS_after: Any
    dq: Any
    dk: Any
    dv: Any
    dgates: tuple[Any, ...]
    dS_before: Any
    dS: Any


def _kernel(p: Plan, stages: Any, batched: bool, kept: tuple[str, ...], table: Any, *refs: Any) -> None:
    n = len(p.widths.given)
    operands, results = refs[: 5 + n + len(kept)], refs[5 + n + len(kept) :]
    x = _Refs(
        *operands[:3],
        operands[3 : 3 + n],
        dict(zip(kept, operands[3 + n : -2], strict=True)),
        *operands[-2:],
        *results[:3],
        results[3 : 3 + n],
        *results[3 + n :],
    )
    chunk = p.chunks - 1 - pl.program_id(1)
    entry = chunk * tb.WORDS
    begin, end, flags = table[entry + tb.BEGIN], table[entry + tb.END], table[entry + tb.FLAGS]
    following = jnp.minimum(chunk + 1, p.chunks - 1) * tb.WORDS

    @pl.when(flags & tb.LAST != 0)
    def _() -> None:
        x.dS[...] = x.dS_after[0]

    if p.packed:

        @pl.when((chunk == p.chunks - 1) | (table[following + tb.BLOCK] != table[entry + tb.BLOCK]))
        def _() -> None:  # the first visit of a block in this order
            for ref in (x.dq, x.dk, x.dv, *x.dgates):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(begin < end)
    def _() -> None:
        rows = Rows(p, begin, end)
        if p.widths == ONE_GATE:
            _chunk(p, stages, x, rows)
        else:
            _channel_chunk(p, stages, batched, x, rows)

    @pl.when(flags & tb.FIRST != 0)
    def _() -> None:
        x.dS_before[0] = x.dS[...]


def _chunk(p: Plan, stages: Any, x: _Refs, rows: Rows) -> None:
    g, b = (rows.head(ref, 0, p.heads) for ref in x.gates)
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
        state(x.kept["S"][0]),
        p.scale,
        rows.heads(x.dO, p.heads, p.V, p.R),
        state(x.dS[...]),
    )
    for ref, a, width in ((x.dq, d.q, p.K), (x.dk, d.k, p.K), (x.dv, d.v, p.V)):
        rows.put(ref, a, width)
    for ref, a in zip(x.dgates, (d.g, d.b), strict=True):
        rows.put_columns(ref, list(jnp.reshape(a, (p.heads, p.C, 1))))
    x.dS[...] = jnp.reshape(d.S, x.dS.shape)


def _channel_chunk(p: Plan, stages: Any, batched: bool, x: _Refs, rows: Rows) -> None:
    mm, operands = KernelProduct(p.precision), []
    refs = list(x.gates)
    widths = {"g": p.widths.decay, "b": p.widths.erase, "w": 0 if p.widths.shared else p.widths.write}
    given = {name: (refs.pop(0), n) for name, n in widths.items() if n}
    key_heads = [[rows.head(ref, h, p.K) for ref in (x.q, x.k)] for h in range(p.P)]
    for i in range(p.heads):
        gate = {name: rows.head(ref, i, n) for name, (ref, n) in given.items()}
        v, dO = (rows.head(ref, i, p.V) for ref in (x.v, x.dO))
        gates = gate["g"], gate.get("b"), gate.get("w")
        operands.append(HeadOperands(*key_heads[i // p.R], v, *gates, x.kept["S"][0, i], dO, x.dS[i]))
    factors = [decay_factors(p, a.g) for a in operands]
    if "Aqk" in x.kept:
        held = lambda name, i: tuple(x.kept[name][0, i]) if name in x.kept else None  # noqa: E731
        solved = [Solved(held("M", i), held("u", i), held("Aqk", i)) for i in range(p.heads)]
    else:
        pairs = by_head(partial(scores, p, mm), list(zip(operands, factors, strict=True)), batched)
        M = stages.inverse(mm, jnp.stack([A for A, _ in pairs])) if p.widths.erase else [None] * p.heads
        solved = [Solved(m, None, Aqk) for m, (_, Aqk) in zip(M, pairs, strict=True)]
    d = by_head(partial(gradients, p, mm), list(zip(operands, factors, solved, strict=True)), batched)
    for h in range(p.P):
        mine = d[h * p.R : (h + 1) * p.R]
        rows.put_head(x.dq, h, sum((a.q for a in mine[1:]), mine[0].q))
        rows.put_head(x.dk, h, sum((a.k for a in mine[1:]), mine[0].k))
    for i, a in enumerate(d):
        rows.put_head(x.dv, i, a.v)
        x.dS[i] = a.S
    for ref, (name, (_, n)) in zip(x.dgates, given.items(), strict=True):
        of = [getattr(a, name) for a in d]
        if n == 1:
            rows.put_columns(ref, of)
        else:
            for i, a in enumerate(of):
                rows.put_head(ref, i, a)


def backward(
    p: Plan,
    q: Array,
    k: Array,
    v: Array,
    gates: Sequence[Array],
    kept: dict[str, Array],
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
        kept: what the forward pass kept of the table's chunks, of p.C tokens. S: the states at their starts [chunks,
            HV, K, V] float32, ``forward``'s probe "S". And where the pipeline kept them, M, u and Aqk [chunks, HV,
            summands, C, C] bfloat16; else they are computed again.
        dO: cotangent of the output [B, T, HV, V]; dS: of the final states [N, HV, K, V] float32.
        dtypes: of the gradients of q and k, and of v.
    """
    table = tb.chunk_table(p, cu_seqlens)
    HV = p.H * p.R
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731

    def place(c: Any, t: Any) -> tuple[Any, Any]:
        block = t[(p.chunks - 1 - c) * tb.WORDS + tb.BLOCK]
        return lax.div(block, jnp.int32(p.blocks)), lax.rem(block, jnp.int32(p.blocks))

    def tokens(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return (*place(c, t), h)

    def column(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        row, block = place(c, t)
        return row, h, block, 0

    def slot(h: Any, c: Any, t: Any) -> tuple[Any, ...]:
        return t[(p.chunks - 1 - c) * tb.WORDS + tb.SLOT], h, 0, 0

    keys = pl.BlockSpec((1, p.C, p.P * p.K), tokens)
    values = pl.BlockSpec((1, p.C, p.heads * p.V), tokens)
    blocks = [gate_block(p, a, n, tokens, column) for a, n in zip(gates, p.widths.given, strict=True)]
    given, gate = [a for a, _ in blocks], [spec for _, spec in blocks]
    states = pl.BlockSpec((1, p.heads, p.K, p.V), slot)

    def of_chunk(a: Array) -> pl.BlockSpec:
        rest = a.shape[2:]
        return pl.BlockSpec((1, p.heads, *rest), lambda h, c, t: (p.chunks - 1 - c, h, *(0,) * len(rest)))

    rows = lambda width, of: jax.ShapeDtypeStruct((p.B, p.T, width), of)  # noqa: E731
    dq, dk, dv, *dgates, dS0 = pallas_call(
        partial(_kernel, p, stages, interpret is not False, tuple(kept)),
        name="gated_delta_rule_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(p.groups, p.chunks),
            in_specs=[keys, keys, values, *gate, *map(of_chunk, kept.values()), values, states],
            out_specs=[keys, keys, values, *gate, states],
            scratch_shapes=[pltpu.VMEM((p.heads, p.K, p.V), jnp.float32)],
        ),
        out_shape=result_shapes(
            [
                *[rows(p.H * p.K, dtypes[0])] * 2,
                rows(HV * p.V, dtypes[1]),
                *[jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (*given, dS)],
            ],
            q,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=None if p.vmem < 8 << 20 else p.vmem + (8 << 20),
        ),
        interpret=interpret,
    )(table, flat(q), flat(k), flat(v), *given, *kept.values(), flat(dO), dS)
    heads = lambda a, width: jnp.reshape(a, (p.B, p.T, -1, width))  # noqa: E731
    found = [gates_by_token(p, a, n) for a, n in zip(dgates, p.widths.given, strict=True)]
    return RuleGradients(heads(dq, p.K), heads(dk, p.K), heads(dv, p.V), tuple(found), dS0)
