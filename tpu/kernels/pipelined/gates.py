"""The gates of all chunks of a grid step, with one decay per head or a few: sums, and what they scale."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..common.decay_trees import by_shifts, decay_sums, to_chunk_end
from ..common.registers import BF16, F32, divided, iota
from ..common.summands import exact_pieces
from ..common.tiles import CHUNK
from . import prologue
from .geometry import Pipeline
from .memory import place_of_chunk
from .parts import Part, own
from .refs import Inputs
from .vmem import spread_by_xlu

__all__ = ["Gates", "StepGates", "gates_of_chunks"]

Array = Any


class Gates(NamedTuple):
    """The gates of one chunk: decays in sublanes and tokens in lanes [decays, C], and what is to be spread from it. A
    head has one decay, or one for each group of its key channels; heads side by side.

    G: base-2 sum of log decays since the last reset; b: gate; into: what a token leaves in the state after the chunk,
    b 2^(G_C - G), 0 before a reset. As columns to be spread, float32 [C, decays] or bfloat16 pieces side by
    side [C, 3 decays]: sum, which is G; before, 2^G or 0 behind a reset; run, the number of tokens since a reset.
    """

    G: Array
    b: Array
    into: Array
    sum: Array
    before: Array
    run: Array


def gates_of_chunks(p: Pipeline, g: Array, b: Array) -> list[Gates]:
    """Those of several chunks, from log decays and gates [chunks decays, C]: the chain of gathers that makes sums is
    waited for only once."""
    decays = decay_sums(g, by_shifts)
    before = decays.from_start
    seen, to_end = to_chunk_end(decays)
    into = jnp.where(seen, b * jnp.exp2(to_end), 0.0)
    # The matrix unit spreads what leaves the XLU free; where products are not rounded it has more to do itself.
    exact = lambda a: [a]  # noqa: E731
    several = lambda a: [piece.astype(F32) for piece in exact_pieces(a)]  # noqa: E731
    by_xlu = spread_by_xlu(p)
    kinds = [
        several(decays.sum),
        (exact if by_xlu else several)(before),
        exact((decays.lane - decays.last_reset).astype(F32)),  # which bfloat16 holds, too
    ]
    found = []
    of_chunk = p.heads * p.decays
    for first in range(0, g.shape[0], of_chunk):
        here = slice(first, first + of_chunk)
        columns = jnp.concatenate([a[here] for kind in kinds for a in kind], 0).T
        cuts = [0]
        for kind in kinds:
            cuts.append(cuts[-1] + len(kind) * of_chunk)
        sum_, before_, run = (columns[:, a:b] for a, b in pairwise(cuts))
        if not by_xlu:
            before_, run = before_.astype(BF16), run.astype(BF16)
        found.append(Gates(decays.sum[here], b[here], into[here], sum_.astype(BF16), before_, run))
    return found


class StepGates:
    """The gates of every chunk of a grid step, computed when the first one is asked for."""

    def __init__(self, p: Pipeline, inputs: Inputs, parts: list[Part]) -> None:
        """``parts``: where the step's chunks lie in their blocks."""
        self.p, self.inputs, self.parts = p, inputs, parts
        self._found: list[Gates] = []

    def of(self, u: int) -> Gates:
        """The gates of one chunk."""
        if not self._found:
            self._found = gates_of_chunks(self.p, *self._read())
        return self._found[u]

    def _rows(self, refs: list[Any]) -> Array:
        """A gate of all chunks, [chunks decays, C]."""
        places = [place_of_chunk(self.p, refs, u) for u in range(self.p.U)]
        return jnp.concatenate([ref[0, 0, :, first : first + CHUNK] for ref, first in places], 0)

    def _read(self) -> tuple[Array, Array]:
        """Log decays and gates of all chunks, 0 in rows that are not theirs."""
        p, n = self.p, self.p.decays
        assert self.inputs.b is not None
        g, b = self._rows(self.inputs.g), self._rows(self.inputs.b)
        if n > 1:  # its head's for every decay
            b = jnp.concatenate([b[i : i + 1] for i in range(b.shape[0]) for _ in range(n)], 0)
        if p.inside.gate:
            assert self.inputs.gate is not None
            columns = [jnp.concatenate([self.inputs.gate[0, :, n : n + 1]] * p.U, 0) for n in range(2)]
            g = prologue.log_decay(p.inside, g, columns)
        if p.masked:
            mine = self._own(g)
            g, b = jnp.where(mine, g, 0.0), jnp.where(mine, b, 0.0)
        return g, b

    def _own(self, g: Array) -> Array:
        """Which tokens are their chunk's, of rows of all chunks."""
        p = self.p
        chunk, begin, end = divided(iota(g.shape, 0), p.heads * p.decays), 0, self.parts[0].end
        for u in range(1, p.U):
            end = jnp.where(chunk == u, self.parts[u].end, end)
        if p.packed:
            for u in range(p.U):
                begin = jnp.where(chunk == u, self.parts[u].begin, begin)
        return own(p, Part(begin, end), iota(g.shape, 1))
