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

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....spec.stages import Decays
from ... import table as tb
from ..common.launching import launch
from ..common.products import KernelProduct
from .blocks import Blocks, ForwardInputs, Making, PlainOperands, Results
from .plan import Plan
from .rows import Rows

__all__ = ["PROBED", "forward"]

Array = Any
Ref = Any

#: What a probe may return beside o and the states; each [chunks, HV, rows, columns] float32.
PROBED = ("G", "count", "Akk", "Aqk", "T", "U", "W", "S", "after", "Vn", "o")


def _kernel(p: Plan, stages: Any, probe: tuple[str, ...], table: Ref, x: ForwardInputs, out: Results, S: Ref) -> None:
    entry = pl.program_id(1) * tb.WORDS
    begin, end, flags = table[entry + tb.BEGIN], table[entry + tb.END], table[entry + tb.FLAGS]

    @pl.when(flags & tb.FIRST != 0)
    def _() -> None:
        S[...] = x.before[0]

    @pl.when(flags & tb.FRESH != 0)
    def _() -> None:
        out.o[...] = jnp.zeros(out.o.shape, out.o.dtype)

    @pl.when(begin < end)
    def _() -> None:
        found = _chunk(Rows(p, begin, end), stages, x, out.o, S, "U" in probe)
        for name, ref in zip(probe, out.probes, strict=True):
            ref[0] = jnp.reshape(found[name], ref.shape[1:])

    @pl.when(flags & tb.LAST != 0)
    def _() -> None:
        out.after[0] = S[...]


def _chunk(rows: Rows, stages: Any, x: ForwardInputs, o_ref: Ref, S: Ref, solves: bool) -> dict[str, Any]:
    """One chunk of all heads of a grid step, and what may be shown of it; ``solves``: U and W, too."""
    p = rows.p
    mm = KernelProduct(p.precision)
    q, k, v = rows.heads(x.q, p.P, p.K, 1), rows.heads(x.k, p.P, p.K, 1), rows.heads(x.v, p.heads, p.V, p.R)
    given = [rows.head(ref, 0, p.heads * n) for ref, n in zip(x.gates, p.widths.given, strict=True)]
    G, count = (rows.by_head(a, p.widths.decay) for a in stages.decay(given.pop(0)))
    decays = Decays(G, count)
    b = rows.by_head(given.pop(0), p.widths.erase) if p.widths.erase else None
    w = b if p.widths.shared else rows.by_head(given.pop(0), p.widths.write) if p.widths.write else None
    before = jnp.reshape(S[...], (p.P, p.R, p.K, p.V))

    Akk, Aqk = stages.scores(mm, q, k, b, decays, p.scale)
    T = None if Akk is None else stages.inverse(mm, Akk)
    Vn = stages.delta(mm, T, k, v, b, w, decays, before)
    o = stages.output(mm, q, Aqk, Vn, decays, before, p.scale)
    after = stages.state(mm, k, Vn, decays, before)

    S[...] = jnp.reshape(after, S.shape)
    rows.put(o_ref, o, p.V)
    U, W = stages.wy(mm, T, k, v, b, w, decays) if solves else (None, None)
    return dict(zip(PROBED, (G, count, Akk, Aqk, T, U, W, before, after, Vn, o), strict=True))


def forward(
    p: Plan,
    x: PlainOperands,
    S: Array,
    cu_seqlens: Array | None,
    making: Making = Making(),  # noqa: B008
    probe: tuple[str, ...] = (),
) -> tuple[Array, Array, dict[str, Array]]:
    """The bare rule by the kernel.

    Args:
        p: the plan.
        x: the operands; o has the dtype of v.
        S: states that the sequences start from, [N, HV, K, V] float32.
        cu_seqlens: [N + 1] or None.
        making: interpreted or not, and the functions that the kernel is made of.
        probe: names of ``PROBED``, of values of each chunk to be returned too.

    Returns:
        o [B, T, HV, V], final states, and the probed values by name, of those that there are, [chunks, HV, ...];
        chunks are those of the table.
    """
    blocks, table = Blocks(p), tb.chunk_table(p, cu_seqlens)
    HV = p.H * p.R
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731
    shown = {name: shape for name, shape in _probe_shapes(p).items() if name in probe}
    q, k, v = flat(x.q), flat(x.k), flat(x.v)
    gates = blocks.gates(x.gates)
    operands = ForwardInputs(blocks.keys(q), blocks.keys(k), blocks.values(v), gates, blocks.states(S))
    array = jax.ShapeDtypeStruct
    results = Results(
        blocks.values(array((p.B, p.T, HV * p.V), x.v.dtype)),
        blocks.states(array(S.shape, jnp.float32)),
        tuple(blocks.of_chunk(array((p.chunks, HV, *shape), jnp.float32)) for shape in shown.values()),
    )
    room = None if p.vmem < 8 << 20 else 2 * p.vmem if len(probe) > 1 else p.vmem + (8 << 20)
    how = blocks.launch("gated_delta_rule_forward", room, making.interpret)
    state = pltpu.VMEM(p.state, jnp.float32)
    out = launch(partial(_kernel, p, making.stages, tuple(shown)), how, table, operands, results, state)
    return jnp.reshape(out.o, (p.B, p.T, HV, p.V)), out.after, dict(zip(shown, out.probes, strict=True))


def _probe_shapes(p: Plan) -> dict[str, tuple[int, int]]:
    """[rows, columns] a head of what ``PROBED`` names and the variant has."""
    decay, square, keys, values, state = (p.C, p.widths.decay), (p.C, p.C), (p.C, p.K), (p.C, p.V), (p.K, p.V)
    shapes = (decay, decay, square, square, square, values, keys, state, state, values, values)
    missing = () if p.widths.erase else ("Akk", "T", "W")
    return {name: shape for name, shape in zip(PROBED, shapes, strict=True) if name not in missing}
