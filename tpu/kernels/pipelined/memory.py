"""What one chunk of a grid step reads and writes in VMEM: its tokens, its states, what is kept, its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ....spec.problem import NormKind
from ..common.norm import normed_output
from ..common.registers import F32, iota
from ..common.summands import Parts
from ..common.tiles import CHUNK, LANES
from . import prologue
from .geometry import Pipeline, Span
from .parts import Part, own, own_rows
from .products import halves
from .refs import Inputs, Outputs, Scratch, TokenInputs
from .states import placed

__all__ = ["ChunkMemory", "Tokens", "lanes_of_span", "place_of_chunk", "tile"]

Array = Any
Ref = Any


def place_of_chunk(p: Pipeline, refs: Sequence[Ref], u: int) -> tuple[Ref, int]:
    """Where a chunk lies: which of the grid step's blocks, and from which token of it on."""
    return (refs[u], 0) if p.packed else (refs[0], u * CHUNK)


def tile(place: tuple[Ref, int], number: int) -> Array:
    """128 channels of a chunk's block [C, 128], as they lie there."""
    ref, first = place
    return ref[0, first : first + CHUNK, number * LANES : (number + 1) * LANES]


def lanes_of_span(span: Span, tiles: list[Array]) -> Array:
    """A head's channels [C, lanes of its tiles] from those tiles, with 0 in the lanes of neighbours."""
    a = jnp.concatenate(tiles, 1) if len(tiles) > 1 else tiles[0]
    if span.whole:
        return a
    lane = iota(a.shape, 1)
    return jnp.where((lane >= span.low) & (lane < span.high), a, jnp.zeros((), a.dtype))


class Tokens:
    """q, k or v of one chunk."""

    def __init__(self, p: Pipeline, inputs: TokenInputs, windows: list[Ref] | None, u: int, norm: bool) -> None:
        """``windows``: of the convolution, as many as there are blocks; ``norm``: whether l2norm is inside."""
        self.p, self.inputs, self.windows, self.u, self.norm = p, inputs, windows, u, norm
        self._convolved: dict[int, Array] = {}

    def _tile(self, number: int) -> Array:
        """128 channels, behind the convolution if it is inside; a tile that heads share is computed with the first."""
        p = self.p
        if self.windows is None:
            assert self.inputs.now is not None
            return tile(place_of_chunk(p, self.inputs.now, self.u), number)
        if number not in self._convolved:
            window, first = place_of_chunk(p, self.windows, self.u)
            self._convolved[number] = prologue.convolved(p.inside, window, self.inputs.taps, first, CHUNK, number)
        return self._convolved[number]

    def prepared(self, span: Span) -> Array:
        """A head in whole tiles [C, lanes], behind convolution and norm: float32 if there is either."""
        a = lanes_of_span(span, [self._tile(span.first + n) for n in range(span.tiles)])
        return prologue.normalised(a.astype(F32)) if self.norm else a

    def late(self, span: Span) -> Array:
        """A head in whole tiles as ``advance`` reads it, as it lies in HBM."""
        assert self.inputs.late is not None
        place = place_of_chunk(self.p, self.inputs.late, self.u)
        return lanes_of_span(span, [tile(place, span.first + n) for n in range(span.tiles)])


class ChunkMemory:
    """One chunk of a grid step, number ``u`` of it.

    Attributes:
        scored, advanced: where the chunk lies for ``scores``, and the one U chunks before it for ``advance``.
        q, k, v: its tokens.
    """

    def __init__(
        self, p: Pipeline, refs: tuple[Inputs, Outputs, Scratch], u: int, scored: Part, advanced: Part
    ) -> None:
        self.p, self.u, self.scored, self.advanced = p, u, scored, advanced
        self.inputs, self.outputs, self.scratch = refs
        units = self.scratch.units
        windows = [unit.windows for unit in units if unit.windows is not None]
        tokens = lambda x, filled, norm: Tokens(p, x, filled or None, u, norm)  # noqa: E731
        self.q = tokens(self.inputs.q, [w.q for w in windows], p.inside.norm)
        self.k = tokens(self.inputs.k, [w.k for w in windows], p.inside.norm)
        self.v = tokens(self.inputs.v, [w.v for w in windows], False)
        self._unit, self._next = (units[n % len(units)] for n in (u, u + 1))
        self._last = units[u - 1 if p.packed else 0]

    def scored_rows(self, a: Array) -> Array:
        """a [C, lanes] of ``scores``, with 0 in rows that are not the chunk's."""
        return own_rows(self.p, self.scored, a)

    def advanced_rows(self, a: Array) -> Array:
        """a [C, lanes] of ``advance``, with 0 in rows that are not the chunk's."""
        return own_rows(self.p, self.advanced, a)

    def channels(self, refs: list[Ref], number: int) -> Array:
        """128 channels of a gate by channel [C, 128] float32."""
        return tile(place_of_chunk(self.p, refs, self.u), number).astype(F32)

    def state(self, i: int) -> Array:
        """The state that the chunk starts from, of a value head, in whole tiles [key lanes, value lanes]."""
        p, key, value = self.p, self.p.keys[i // self.p.R], self.p.values[i]
        S = self._unit.S[i, : key.lanes, : value.lanes]
        if p.packed:
            given: Any = 0.0
            if self.inputs.S_first is not None:
                given = placed(self.inputs.S_first[self.u][0, i], key, value)
            S = jnp.where(self.advanced.first, given, S)
        return S

    def put_state(self, i: int, S: Array) -> None:
        """The state after the chunk, of a value head, for the chunk that follows."""
        self._next.S[i, : S.shape[0], : S.shape[1]] = S

    def keep_state(self, i: int, S: Array) -> None:
        """Keep the state that the chunk starts from, of a value head, if the plan does."""
        if self.outputs.kept.S is not None:
            key, value = self.p.keys[i // self.p.R], self.p.values[i]
            self.outputs.kept.S[0, self.u, i] = S[key.low : key.high, value.low : value.high]

    def keep(self, ref: Ref | None, i: int, a: Array | Parts) -> None:
        """Keep [C, C] of a value head as it enters products, where the plan has a place for it."""
        if ref is not None:
            for n, part in enumerate(a if isinstance(a, tuple) else halves(self.p, a)):
                ref[0, self.u, i, n] = part

    def put_head(self, i: int, o: Array) -> None:
        """The output of a value head in whole tiles that no other head has lanes in [C, lanes], through the norm if
        that is inside."""
        p, span = self.p, self.p.values[i]
        if p.norm is not None:
            o = self._normed(p.norm, span, o)
        for n in range(span.tiles):
            self.put_output(span.first + n, o[:, n * LANES : (n + 1) * LANES])

    def _normed(self, kind: NormKind, span: Span, o: Array) -> Array:
        if self.outputs.o_kept is not None:
            lanes = slice(span.first * LANES, span.first * LANES + span.lanes)
            self._put(self.outputs.o_kept, (self._unit.kept_stage, self._last.kept_stage), lanes, o)
        z = None
        if self.inputs.z is not None:
            place = place_of_chunk(self.p, self.inputs.z, self.u)
            z = lanes_of_span(span, [tile(place, span.first + n) for n in range(span.tiles)]).astype(F32)
        assert self.inputs.norm_weight is not None
        return normed_output(kind, o, self.inputs.norm_weight[...], z)

    def put_output(self, number: int, o: Array) -> None:
        """128 channels of the output [C, 128]; of packed sequences the chunk's rows alone, beside what others left."""
        lanes = slice(number * LANES, (number + 1) * LANES)
        self._put(self.outputs.o, (self._unit.o_stage, self._last.o_stage), lanes, o)

    def _put(self, ref: Ref, stages: tuple[Ref | None, Ref | None], lanes: slice, o: Array) -> None:
        """Some lanes of the chunk's rows; stages: this chunk's and the one's before it, of packed sequences."""
        if not self.p.packed:
            first = self.u * CHUNK
            ref[0, first : first + CHUNK, lanes] = o.astype(ref.dtype)
            return
        stage, last = stages
        assert stage is not None
        assert last is not None
        others = jnp.where(self.advanced.fresh, 0.0, last[:, lanes].astype(F32))
        stage[:, lanes] = jnp.where(own(self.p, self.advanced, iota(o.shape, 0)), o, others).astype(stage.dtype)
