"""The table of chunks: which tokens each grid step works on and which state it carries on.

Chunks never cross a multiple of C, counted from the row's first token, nor a boundary of sequences: the tokens of a
chunk lie in one aligned block, which is fetched as it lies, and rows of the block outside the chunk are masked. (Chunks
counted from each sequence's first token would lie across two blocks and have to be shifted into place; their number has
the same bound.) Chunks of one block follow each other, so that its output stays in VMEM until all of them have written
their rows. An empty sequence has one chunk without tokens, which hands its state through.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .kernels.pipelined.geometry import Pipeline
from .kernels.plain.plan import Plan

__all__ = ["BEGIN", "BLOCK", "END", "FIRST", "FLAGS", "FRESH", "LAST", "SLOT", "WORDS", "chunk_table"]

Array = Any

#: Places of an entry's words: the block of C tokens (row * blocks a row + place in the row), the first row in the block
#: and the one after the last, the state, and flags.
BLOCK, BEGIN, END, SLOT, FLAGS = range(5)
WORDS = 5
#: Flags: a sequence's first chunk, its last chunk, and the first visit of a block.
FIRST, LAST, FRESH = 1, 2, 4


def chunk_table(p: Plan | Pipeline, cu_seqlens: Array | None) -> Array:
    """int32 [p.chunks * WORDS], entry by entry. ``cu_seqlens`` [N + 1] may be traced: indices are bound by T."""
    if cu_seqlens is None:
        row, place = np.divmod(np.arange(p.chunks, dtype=np.int32), p.blocks)
        end = np.minimum(p.C, p.T - place * p.C)
        flags = FIRST * (place == 0) + LAST * (place == p.blocks - 1) + FRESH
        entries = np.stack([row * p.blocks + place, np.zeros_like(end), end, row, flags], 1)
        return jnp.asarray(entries.astype(np.int32).ravel())
    bounds = jnp.clip(jnp.asarray(cu_seqlens).astype(jnp.int32), 0, p.T)
    start, stop = bounds[:-1], bounds[1:]
    count = jnp.where(start < stop, (stop - 1) // p.C - start // p.C + 1, 1)
    ends = jnp.cumulative_sum(count, dtype=jnp.int32)
    index = jnp.arange(p.chunks, dtype=jnp.int32)
    slot = jnp.clip(jnp.searchsorted(ends, index, side="right"), 0, p.N - 1).astype(jnp.int32)
    own = index - (ends - count)[slot]
    # The table is as long as it may have to be. Spare entries go on behind the last sequence, which may end before T
    # (nobody could check it), and leave zeros there.
    spare = index >= ends[-1]
    block = jnp.where(spare, (stop[-1] - 1) // p.C + 1 + index - ends[-1], start[slot] // p.C + own)
    block = jnp.clip(block, 0, p.blocks - 1)
    within = lambda bound: jnp.where(spare, 0, jnp.clip(bound[slot] - block * p.C, 0, p.C))  # noqa: E731
    role = jnp.where(spare, 0, FIRST * (own == 0) + LAST * (own == count[slot] - 1))
    before = jnp.concatenate([jnp.full_like(block[:1], -1), block[:-1]])
    table = jnp.stack([block, within(start), within(stop), slot, role + FRESH * (block != before)], 1)
    return table.astype(jnp.int32).ravel()
