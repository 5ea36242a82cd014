"""The forward kernel for long sequences: chunks in a software pipeline.

A chunk's work is one long chain of dependent products, and the matrix unit takes products in program order: a head by
itself leaves it idle most of the time. So a grid step works on several heads, and of each on several chunks that are at
different stages; what the file has side by side is independent, and heads and phases alternate in program order.

| phase | chunk | what | unit |
|---|---|---|---|
| ``scores`` | c | decays, Akk, Aqk, k^T scaled for the state; diagonal blocks of 16, side by side | MXU, vector |
| ``solve_16`` | c - 1 | those blocks' inverses, by substitution, in float32 | XLU, vector |
| ``solve_64`` | c - 2 | joins blocks to 32, and begins to join them to 64 | MXU |
| ``solve_128`` | c - 3 | joins blocks to 64 and to 128: the whole inverse | MXU |
| ``advance`` | c - U | what the state and the chunk's own tokens give, the output, the next state | MXU, vector |

U chunks share a grid step, each with scratch of its own, so that the compiler sees which loads and stores concern each
other; chunk c's scratch is read by ``advance`` before ``scores`` fills it again.

The algebra differs from the specification's in one place: writing M = (I + L diag(b))^-1, where Akk = diag(b) L, the
inverse of the specification is T = diag(b) M diag(b)^-1, and Vn = diag(b) u with u = M (v - (k exp G) S). So gates only
ever scale columns of matrices, which a row of lanes does for nothing, and u takes Vn's place (b enters Aqk and k^T).
What must scale rows (exp G, and G itself in differences) is spread across the lanes by the matrix unit, from three
bfloat16 pieces that add up to the float32 value, bit for bit: the lane broadcast of the XLU takes four times as long.

With decays by channel ``scores`` and ``advance`` are ``channel_scores`` and ``channel_advance``, and without an erase
gate there is nothing to solve.

A reset inside a chunk: row i sees columns j with i - j <= run_i, the number of tokens since the last reset, and 2^G
is 0 behind a reset for whatever comes from before the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import table as tb
from ..common.interleaving import interleave
from ..common.launching import Launch, launch
from ..common.registers import square_indices
from ..common.tiles import CHUNK
from . import advance, channel_advance, channel_scores, scores
from .blocks import Epilogue, GateOperands, Prologue, TokenOperands, input_blocks, output_blocks, scratch
from .gates import StepGates
from .geometry import Pipeline
from .inverse import solve_16, solve_64, solve_128
from .memory import ChunkMemory
from .parts import Part, late, now, parts_of_rows, read_table
from .refs import Inputs, Outputs, Scratch
from .sending import PackedResults
from .slots import Slot
from .states import fill_state, head_states
from .vmem import vmem
from .windows import fill_window_of_chunk, fill_windows

__all__ = ["forward"]

Array = Any
Ref = Any


def _kernel(p: Pipeline, table: Ref | None, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    if p.packed:
        _packed_step(p, table, (inputs, outputs, scratch))
    else:
        _step_of_rows(p, (inputs, outputs, scratch))


def _step_of_rows(p: Pipeline, refs: tuple[Inputs, Outputs, Scratch]) -> None:
    """A grid step whose chunks follow each other in a row."""
    inputs, outputs, scratch = refs
    entry, unit = pl.program_id(1), scratch.units[0]
    step, step_late = (lax.rem(at, jnp.int32(p.steps)) for at in (now(p, entry), late(entry)))
    scored, advanced = parts_of_rows(p, step), parts_of_rows(p, step_late)

    @pl.when(step_late == 0)
    def _() -> None:
        assert inputs.S_first is not None
        fill_state(p, unit.S, inputs.S_first[0])

    if p.inside.width:
        fill_windows(p, inputs, unit, step == 0)
    _run_phases(p, refs, scored, advanced)

    @pl.when(step_late == p.steps - 1)
    def _() -> None:
        for i, S in head_states(p, unit.S):
            outputs.S_last[0, i] = S


def _packed_step(p: Pipeline, table: Ref, refs: tuple[Inputs, Outputs, Scratch]) -> None:
    """A grid step whose chunks lie where the table of chunks says."""
    part, entry = pl.program_id(0), pl.program_id(1)
    inputs, _, scratch = refs
    scored, advanced = (read_table(p, table, part, at) for at in (now(p, entry), late(entry)))
    scored_parts, advanced_parts = scored.parts, advanced.parts

    @pl.when(entry > 1)
    def _() -> None:
        PackedResults(p, *refs, read_table(p, table, part, entry - 2)).wait()

    if p.inside.width:
        for u in range(p.U):
            fill_window_of_chunk(p, inputs, scratch.units, u, scored_parts[u])
    _run_phases(p, refs, scored_parts, advanced_parts)
    results = PackedResults(p, *refs, advanced)
    pl.when(entry > 0)(results.send)
    pl.when(entry == p.entries)(results.wait)


def _run_phases(p: Pipeline, refs: tuple[Inputs, Outputs, Scratch], scored: list[Part], advanced: list[Part]) -> None:
    """The phases of a grid step: of each chunk what it is at, side by side.

    scored, advanced: where the chunks lie for the phases of these names.
    """
    gates = StepGates(p, refs[0], scored)
    for u in range(p.U):
        interleave(_phases(p, ChunkMemory(p, refs, u, scored[u], advanced[u]), gates))


def _phases(p: Pipeline, chunk: ChunkMemory, gates: StepGates) -> list[Iterator[None]]:
    """The phases that run side by side, each on another chunk.

    The order decides what the units get first; of those that were compiled, this one costs least.
    """
    square, slots = square_indices(CHUNK), chunk.scratch.slots
    slot, solving = slots[chunk.u], [slots[(chunk.u - n) % p.U].blocks for n in (1, 2, 3)]
    if isinstance(slot, Slot):
        first, scored = advance.advance(p, chunk, slot), scores.scores(p, chunk, slot, gates, square)
    else:
        first, scored = channel_advance.advance(p, chunk, slot), channel_scores.scores(p, chunk, slot, square)
    if None in solving:  # nothing is erased
        return [first, scored]
    return [
        first,
        solve_128(p, solving[2], square),
        scored,
        solve_64(p, solving[1], square),
        solve_16(p, solving[0]),
    ]


def forward(
    p: Pipeline,
    tokens: TokenOperands,
    gates: GateOperands,
    S: Array | None,
    cu_seqlens: Array | None = None,
    *,
    around: tuple[Prologue | None, Epilogue | None] = (None, None),
    dtypes: tuple[Any, Any],
    interpret: Any = False,
) -> tuple[Array, Array, dict[str, Array]]:
    """The rule, and before and behind it what the plan has inside.

    Args:
        p: the plan.
        tokens: q, k and v.
        gates: the gates.
        S: states that the sequences start from, [B or N, HV, K, V] float32; of packed ones None for zeros.
        cu_seqlens: [N + 1], where sequences are packed.
        around: what a convolution inside takes, and an output norm inside, where there are such.
        dtypes: of o, and of what is kept of it before its norm.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.

    Returns:
        o [B, T, HV, V], the final states, and what the plan keeps of each chunk: S, the state before it, [B, chunks of
        a row, HV, K, V] or [1, entries of the table, HV, K, V]; and M, u, and Aqk without scale, [B, chunks, HV,
        summands, 128, 128] bfloat16; and o before its norm, [B, T, HV V].
    """
    operands = input_blocks(p, tokens, gates, S, *around)
    results = output_blocks(p, dtypes)
    table = tb.chunk_table(p, cu_seqlens) if p.packed else None
    how = Launch("gated_delta_rule_pipeline", (p.parts, p.entries + 1), vmem(p), interpret)
    out = launch(partial(_kernel, p), how, table, operands, results, scratch(p, dtypes))
    by_head = lambda a: jnp.reshape(a[: p.T] if p.packed else a, (p.B, p.T, p.groups * p.heads, p.V))  # noqa: E731
    kept = {name: getattr(out.kept, name) for name in p.keeps if name != "o"}
    return by_head(out.o), out.S_last, kept if out.o_kept is None else {**kept, "o": by_head(out.o_kept)}
