"""The backward kernel of every variant: the grid of ``forward``, its chunks in reverse.

The cotangent of the state goes from one chunk to the one before it in VMEM scratch; the state at each chunk's start was
kept by the forward pass, and everything else of the chunk is computed again. Blocks are those of the forward kernel,
those of gradients as those of their operands. A key head's gradients are summed over its value heads before they leave
the chip. A chunk of a rule with one decay and gate a head is ``gradients``', of any other ``channel_gradients``'.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....spec.stages import RESET, Decays
from ... import table as tb
from ..common.gate_widths import ONE_GATE
from ..common.gradients import Cotangents, Kept, RuleGradients
from ..common.launching import launch
from ..common.products import KernelProduct
from .blocks import BackwardInputs, Blocks, Gradients, Making, PlainOperands
from .channel_gradients import ChannelOperands, Solved, by_head, decay_factors, gradients, scores
from .head_gradients import HeadOperands, chunk_gradients
from .plan import Plan
from .rows import Rows, gates_by_token

__all__ = ["backward"]

Array = Any
Ref = Any


class _Make(NamedTuple):
    """stages: the functions that the kernel is made of; batched: whether heads are one batch, for interpreters."""

    stages: Any
    batched: bool


def _kernel(p: Plan, make: _Make, table: Ref, x: BackwardInputs, out: Gradients, dS: Ref) -> None:
    """A grid step; dS: the cotangent of the state behind the chunk, [heads, K, V] float32."""
    chunk = p.chunks - 1 - pl.program_id(1)
    entry = chunk * tb.WORDS
    begin, end, flags = table[entry + tb.BEGIN], table[entry + tb.END], table[entry + tb.FLAGS]
    following = jnp.minimum(chunk + 1, p.chunks - 1) * tb.WORDS

    @pl.when(flags & tb.LAST != 0)
    def _() -> None:
        dS[...] = x.dS_after[0]

    if p.packed:

        @pl.when((chunk == p.chunks - 1) | (table[following + tb.BLOCK] != table[entry + tb.BLOCK]))
        def _() -> None:  # the first visit of a block in this order
            for ref in (out.q, out.k, out.v, *out.gates):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(begin < end)
    def _() -> None:
        rows = Rows(p, begin, end)
        if p.widths == ONE_GATE:
            _chunk(rows, make.stages, x, out, dS)
        else:
            _channel_chunk(rows, make, x, out, dS)

    @pl.when(flags & tb.FIRST != 0)
    def _() -> None:
        out.dS_before[0] = dS[...]


def _chunk(rows: Rows, stages: Any, x: BackwardInputs, out: Gradients, dS: Ref) -> None:
    """One chunk of all heads of a grid step, with one decay and one gate per head."""
    p = rows.p
    g, b = (rows.head(ref, 0, p.heads) for ref in x.gates)
    G, count = (rows.by_head(a, 1) for a in stages.decay(g))
    state = lambda a: jnp.reshape(a, (p.P, p.R, p.K, p.V))  # noqa: E731
    d = chunk_gradients(
        KernelProduct(p.precision),
        stages,
        HeadOperands(
            q=rows.heads(x.q, p.P, p.K, 1),
            k=rows.heads(x.k, p.P, p.K, 1),
            v=rows.heads(x.v, p.heads, p.V, p.R),
            b=rows.by_head(b, 1),
            decays=Decays(G, count),
            reset=rows.by_head(g, 1) < RESET,
            S=state(x.kept.S[0]),
        ),
        p.scale,
        rows.heads(x.dO, p.heads, p.V, p.R),
        state(dS[...]),
    )
    for ref, a, width in ((out.q, d.q, p.K), (out.k, d.k, p.K), (out.v, d.v, p.V)):
        rows.put(ref, a, width)
    for ref, a in zip(out.gates, (d.g, d.b), strict=True):
        rows.put_columns(ref, list(jnp.reshape(a, (p.heads, p.C, 1))))
    dS[...] = jnp.reshape(d.S, dS.shape)


def _channel_chunk(rows: Rows, make: _Make, x: BackwardInputs, out: Gradients, dS: Ref) -> None:
    """One chunk of all heads of a grid step, decays by channel, heads side by side."""
    p = rows.p
    mm = KernelProduct(p.precision)
    given = _given_gates(p, x)
    operands = _channel_operands(rows, x, given, dS)
    factors = [decay_factors(p, a.g) for a in operands]
    solved = _solved(p, mm, make, x, list(zip(operands, factors, strict=True)))
    d = by_head(partial(gradients, p, mm), list(zip(operands, factors, solved, strict=True)), make.batched)
    for h in range(p.P):
        mine = d[h * p.R : (h + 1) * p.R]
        rows.put_head(out.q, h, sum((a.q for a in mine[1:]), mine[0].q))
        rows.put_head(out.k, h, sum((a.k for a in mine[1:]), mine[0].k))
    for i, a in enumerate(d):
        rows.put_head(out.v, i, a.v)
        dS[i] = a.S
    for ref, (name, (_, n)) in zip(out.gates, given.items(), strict=True):
        of = [getattr(a, name) for a in d]
        if n == 1:
            rows.put_columns(ref, of)
        else:
            for i, a in enumerate(of):
                rows.put_head(ref, i, a)


def _given_gates(p: Plan, x: BackwardInputs) -> dict[str, tuple[Ref, int]]:
    """The gates that are operands by name, and how many per head."""
    refs = list(x.gates)
    widths = {"g": p.widths.decay, "b": p.widths.erase, "w": 0 if p.widths.shared else p.widths.write}
    return {name: (refs.pop(0), n) for name, n in widths.items() if n}


def _channel_operands(
    rows: Rows, x: BackwardInputs, given: dict[str, tuple[Ref, int]], dS: Ref
) -> list[ChannelOperands]:
    """The operands of every value head."""
    p, operands = rows.p, []
    key_heads = [[rows.head(ref, h, p.K) for ref in (x.q, x.k)] for h in range(p.P)]
    for i in range(p.heads):
        gate = {name: rows.head(ref, i, n) for name, (ref, n) in given.items()}
        v, dO = (rows.head(ref, i, p.V) for ref in (x.v, x.dO))
        gates = gate["g"], gate.get("b"), gate.get("w")
        operands.append(ChannelOperands(*key_heads[i // p.R], v, *gates, x.kept.S[0, i], dO, dS[i]))
    return operands


def _solved(p: Plan, mm: KernelProduct, make: _Make, x: BackwardInputs, heads: list[tuple[Any, ...]]) -> list[Solved]:
    """What every value head solved: kept by the forward pass, or computed again; heads: operands and factors."""
    if x.kept.Aqk is not None:
        held = lambda ref, i: None if ref is None else tuple(ref[0, i])  # noqa: E731
        return [Solved(held(x.kept.M, i), held(x.kept.u, i), held(x.kept.Aqk, i)) for i in range(p.heads)]
    pairs = by_head(partial(scores, p, mm), heads, make.batched)
    M = make.stages.inverse(mm, jnp.stack([A for A, _ in pairs])) if p.widths.erase else [None] * p.heads
    return [Solved(m, None, Aqk) for m, (_, Aqk) in zip(M, pairs, strict=True)]


def backward(
    p: Plan,
    x: PlainOperands,
    kept: Kept,
    d: Cotangents,
    cu_seqlens: Array | None,
    dtypes: tuple[Any, Any],
    making: Making = Making(),  # noqa: B008
) -> RuleGradients:
    """Cotangents of the bare rule's operands.

    Args:
        p: the plan of the backward kernel.
        x, cu_seqlens: as ``forward.forward`` takes them.
        kept: what the forward pass kept of the table's chunks, of p.C tokens. S: the states at their starts [chunks,
            HV, K, V] float32, ``forward``'s probe "S". And where the pipeline kept them, M, u and Aqk [chunks, HV,
            summands, C, C] bfloat16; else they are computed again.
        d: cotangents of the output and the final states.
        dtypes: of the gradients of q and k, and of v.
        making: interpreted or not, and the functions that the kernel is made of.
    """
    blocks, table = Blocks(p, backward=True), tb.chunk_table(p, cu_seqlens)
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731
    gates = blocks.gates(x.gates)
    q, k, v, dO = flat(x.q), flat(x.k), flat(x.v), flat(d.dO)
    operands = BackwardInputs(
        blocks.keys(q),
        blocks.keys(k),
        blocks.values(v),
        gates,
        jax.tree.map(blocks.of_chunk, kept),
        blocks.values(dO),
        blocks.states(d.dS),
    )
    array = jax.ShapeDtypeStruct
    dkeys = blocks.keys(array((p.B, p.T, p.H * p.K), dtypes[0]))
    dvalues = blocks.values(array((p.B, p.T, p.H * p.R * p.V), dtypes[1]))
    as_gates = tuple(type(block)(array(block.array.shape, jnp.float32), block.spec) for block in gates)
    results = Gradients(dkeys, dkeys, dvalues, as_gates, blocks.states(array(d.dS.shape, jnp.float32)))
    room = None if p.vmem < 8 << 20 else p.vmem + (8 << 20)
    how = blocks.launch("gated_delta_rule_backward", room, making.interpret)
    make = _Make(making.stages, making.interpret is not False)
    state = pltpu.VMEM(p.state, jnp.float32)
    out = launch(partial(_kernel, p, make), how, table, operands, results, state)
    heads = lambda a, width: jnp.reshape(a, (p.B, p.T, -1, width))  # noqa: E731
    found = tuple(gates_by_token(p, a, n) for a, n in zip(out.gates, p.widths.given, strict=True))
    return RuleGradients(heads(out.q, p.K), heads(out.k, p.K), heads(out.v, p.V), found, out.dS_before)
