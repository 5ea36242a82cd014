"""The backward kernel for long sequences of heads that are a tile wide: chunks in reverse, several heads a grid step.

Each stage runs for all heads before the next begins, so that the matrix unit, which takes products in program order,
has the other heads' products while one waits. Cotangents of V-channel tensors are kept transposed, channels in
sublanes and tokens in lanes: what scales tokens is then a row of lanes and costs nothing. With the pipeline's algebra
(M = (I + L diag(b))^-1, u = M r, r = v - (k 2^G) S; it kept M, u and the chunk's first state S), ^T for transposed,
begin = 2^G or 0 behind a reset, end = 2^(G_C - G) or 0 before one, D_ij = 2^(G_i - G_j) or 0:

| stage | what | products |
|---|---|---|
| ``read`` | gates; q^T, k^T, dO^T, S^T; scores q k^T, k q^T, k k^T | 3 a key head |
| ``solve`` | du^T = b (dO^T Aqk + dS^T (k end)^T) | 2 |
| ``erase`` | Y^T = du^T M, the cotangent of r and of v | 1 |
| ``before`` | u dO^T, u dS^T, S dO^T | 3 |
| ``pairs`` | u Y^T, S Y^T; dS <- 2^G_C dS + (q begin)^T dO - (k begin)^T Y | 4 |
| ``keys`` | W = D^T (u dO^T, - u Y^T); dq^T, dk^T from them; dk from both; sums of pairs for dg | 6 |
| ``results`` | sums over value heads, transposes back, the gates' cotangents | 0 |

The cotangents of a gate gather, on each side of a token, what decays across it (docs/algorithm.md): pairs are summed
over i >= t by a product with ones, in two halves; that and what keys j < t write are then scaled by b_j and summed over
j; column 0 of the same sum, unscaled, is the cotangent of b. Its other form, the product of u with Y / b, does not
cancel, and is taken wherever b is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..common.gradients import Cotangents, Kept, NormOperands, RuleGradients
from ..common.interleaving import interleave
from ..common.launching import Block, Launch, launch
from ..common.registers import F32, divided
from ..common.tiles import CHUNK
from .backward_chunk import BackwardChunk
from .backward_plan import Reverse
from .backward_refs import Inputs, NormInputs, Outputs, Refs

__all__ = ["ReverseOperands", "reverse"]

Array = Any
Ref = Any
C = CHUNK
#: Stages between the beginnings of two chunks: the next one's ``solve`` needs the state's cotangent from ``pairs``.
OVERLAP = 3


def _kernel(p: Reverse, table: None, x: Inputs, out: Outputs, dSt: Ref) -> None:
    step = lax.rem(pl.program_id(1), jnp.int32(p.steps))

    @pl.when(step == 0)
    def _() -> None:
        dSt[...] = x.dS_last[0]

    if out.norm_sums is not None:

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            out.norm_sums[...] = jnp.zeros(out.norm_sums.shape, F32)

    for together in _order(p, Refs(x, out, dSt), step):
        interleave(together)

    @pl.when(step == p.steps - 1)
    def _() -> None:
        out.dS_first[0] = dSt[...]


def _order(p: Reverse, refs: Refs, step: Array) -> list[list[Iterator[None]]]:
    """The stages of a grid step's chunks, those in one list side by side: a chunk's last stages stand beside the first
    ones of the chunk before it."""
    groups: dict[int, list[Iterator[None]]] = {}
    for u in reversed(range(p.U)):
        chunk = BackwardChunk(p, refs, u, ((p.steps - 1 - step) * p.U + u) * C)
        solve, erase = [chunk.solve()], [chunk.erase()]
        (solve if p.summands == 1 else erase).append(chunk.before())  # where it was found to cost least
        stages = ([chunk.read()], solve, erase, [chunk.pairs()], [chunk.keys()], [chunk.results()])
        for n, together in enumerate(stages):
            groups.setdefault((p.U - 1 - u) * OVERLAP + n, []).extend(together)
    return [groups[n] for n in sorted(groups)]


class ReverseOperands(NamedTuple):
    """q, k: [B, T, H, 128] bfloat16; g, b: log decay and gate, [B, T, HV] float32; norm: where the plan has one."""

    q: Array
    k: Array
    g: Array
    b: Array
    norm: NormOperands | None = None


def _blocks(
    p: Reverse, x: ReverseOperands, kept: Kept, d: Cotangents, dtypes: tuple[Any, Any]
) -> tuple[Inputs, Outputs]:
    """Operands and results of the kernel, and the blocks of a grid step; chunks from the last to the first."""
    flat = lambda a: jnp.reshape(a, (p.B, p.T, -1))  # noqa: E731
    rows = lambda a: jnp.reshape(jnp.swapaxes(a, 1, 2), (p.B, p.groups, p.heads, p.T))  # noqa: E731

    def where(part: Array, entry: Array) -> tuple[Array, Array, Array]:
        rest, step = divided(entry, p.steps), lax.rem(entry, jnp.int32(p.steps))
        rest = rest + part * (p.entries // p.steps)
        return divided(rest, p.groups), lax.rem(rest, jnp.int32(p.groups)), p.steps - 1 - step

    def block(shape: tuple[int, ...], place: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda part, entry: place(*where(part, entry)))

    keys, values = (block((1, p.U * C, n * C), lambda r, h, c: (r, c, h)) for n in (p.P, p.heads))
    gate = block((1, 1, p.heads, p.U * C), lambda r, h, c: (r, h, 0, c))
    state = block((1, p.heads, C, C), lambda r, h, c: (r, h, 0, 0))
    before = block((1, p.U, p.heads, C, C), lambda r, h, c: (r, c, h, 0, 0))
    solved = block((1, p.U, p.heads, p.summands, C, C), lambda r, h, c: (r, c, h, 0, 0, 0))
    operands = Inputs(
        q=Block(flat(x.q), keys),
        k=Block(flat(x.k), keys),
        g=Block(rows(x.g), gate),
        b=Block(rows(x.b), gate),
        S=Block(kept.S, before),
        M=Block(kept.M, solved),
        u=Block(kept.u, solved),
        dO=Block(flat(d.dO), values),
        dS_last=Block(jnp.swapaxes(d.dS, -1, -2), state),
    )
    shape = jax.ShapeDtypeStruct
    dz = sums = None
    if x.norm is not None:
        o, z, weight = x.norm
        whole = pl.BlockSpec((1, C), lambda part, entry: (0, 0))
        gate_of_output = None if z is None else Block(z, values)
        operands = replace(operands, norm=NormInputs(Block(o, values), gate_of_output, Block(weight[None], whole)))
        dz = None if z is None else Block(shape(z.shape, z.dtype), values)
        sums = Block(shape((p.parts, 8, C), F32), pl.BlockSpec((1, 8, C), lambda part, entry: (part, 0, 0)))
    dkeys = Block(shape((p.B, p.T, p.groups * p.P * C), dtypes[0]), keys)
    dvalues = Block(shape((p.B, p.T, p.groups * p.heads * C), dtypes[1]), values)
    dgate = Block(shape((p.B, p.groups, p.heads, p.T), F32), gate)
    results = Outputs(dkeys, dkeys, dvalues, dgate, dgate, Block(shape(d.dS.shape, F32), state), dz, sums)
    return operands, results


def reverse(
    p: Reverse,
    operands: ReverseOperands,
    kept: Kept,
    cotangents: Cotangents,
    *,
    dtypes: tuple[Any, Any],
    interpret: Any = False,
) -> tuple[RuleGradients, Array | None, Array | None]:
    """Cotangents of the bare rule's operands, and with a norm those of its z [B, T, HV 128], if there is one, and of
    its weight [128] float32.

    Args:
        p: the plan.
        operands: q, k and the gates.
        kept: what the pipeline kept of each chunk: S, the state at its start [B, chunks, HV, 128, 128] float32, and M
            and u [B, chunks, HV, summands, 128, 128] bfloat16.
        cotangents: dO, bfloat16 or, with a norm, whose cotangent it then is, any float; and dS.
        dtypes: of the gradients of q and k, and of v.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.
    """
    given, results = _blocks(p, operands, kept, cotangents, dtypes)
    how = Launch("gated_delta_rule_reverse", (p.parts, p.entries), p.vmem, interpret)
    d = launch(partial(_kernel, p), how, None, given, results, pltpu.VMEM(p.square, F32))
    heads = lambda a: jnp.reshape(a, (p.B, p.T, -1, C))  # noqa: E731
    per_head = lambda a: jnp.swapaxes(jnp.reshape(a, (p.B, -1, p.T)), 1, 2)[..., None]  # noqa: E731
    tokens = [heads(a) for a in (d.dq, d.dk, d.dv)]
    d_weight = None if d.norm_sums is None else jnp.sum(d.norm_sums, (0, 1)) * C**0.5
    rule = RuleGradients(*tokens, (per_head(d.dg), per_head(d.db)), jnp.swapaxes(d.dS_first, -1, -2))
    return rule, d.dz, d_weight
