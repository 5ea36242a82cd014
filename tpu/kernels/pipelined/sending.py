"""The results of packed sequences, which a grid step sends to HBM by hand, and waits for later.

A block of the output whose next chunk belongs to the same step is sent with that one; a state, with its sequence's last
chunk. That of an empty sequence is what was given, to the bit.
"""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ... import table as tb
from ..common.tiles import CHUNK
from .geometry import Pipeline
from .parts import StepEntry
from .refs import Inputs, Outputs, Scratch
from .states import head_states

__all__ = ["PackedResults"]

Array = Any
Ref = Any


class PackedResults:
    """What the chunks of one grid step leave for HBM; ``send`` and ``wait`` are for the same step."""

    def __init__(self, p: Pipeline, inputs: Inputs, outputs: Outputs, scratch: Scratch, entry: StepEntry) -> None:
        self.p, self.inputs, self.outputs, self.scratch, self.entry = p, inputs, outputs, scratch, entry

    def send(self) -> None:
        """Start the copies."""
        p = self.p
        for u, chunk in enumerate(self.entry.chunks):
            self._when_whole(u, lambda u=u: self._start(u))
            last, empty = chunk.flags & tb.LAST != 0, chunk.begin == chunk.end
            pl.when(last & ~empty if p.starts else last)(lambda u=u: self._send_state(u))
            if p.starts:
                pl.when(last & empty)(lambda u=u: self._send_given_state(u))

    def wait(self) -> None:
        """Wait until they have arrived."""
        for u, chunk in enumerate(self.entry.chunks):
            self._when_whole(u, lambda u=u: self._await(u))
            last, empty = chunk.flags & tb.LAST != 0, chunk.begin == chunk.end
            pl.when(last & ~empty if self.p.starts else last)(lambda u=u: self._state(u, self._state_place(u)).wait())

    def _when_whole(self, u: int, action: Any) -> None:
        """Act on a chunk's block of the output where no other chunk of the step writes to it too."""
        if u == self.p.U - 1:
            action()
        else:
            pl.when(self.entry.chunks[u + 1].flags & tb.FRESH != 0)(action)

    def _start(self, u: int) -> None:
        for copy in self._outputs(u):
            copy.start()

    def _await(self, u: int) -> None:
        for copy in self._outputs(u):
            copy.wait()

    def _outputs(self, u: int) -> list[Any]:
        """The copies of a chunk's block of the output, and of what is kept of it before its norm."""
        width = self.p.heads * self.p.V
        place = pl.ds(self.entry.chunks[u].block * CHUNK, CHUNK), pl.ds(self.entry.group * width, width)
        unit, scratch, outputs = self.scratch.units[u], self.scratch, self.outputs
        pairs = [(unit.o_stage, outputs.o, scratch.o_sent)]
        if outputs.o_kept is not None:
            pairs.append((unit.kept_stage, outputs.o_kept, scratch.kept_sent))
        return [pltpu.make_async_copy(stage, o.at[place], sent.at[u]) for stage, o, sent in pairs]

    def _state_place(self, u: int) -> Ref:
        heads = self.p.heads
        return self.outputs.S_last.at[self.entry.chunks[u].slot, pl.ds(self.entry.group * heads, heads)]

    def _after(self, u: int) -> Ref:
        """The state after a chunk, which is where the next one finds it."""
        return self.scratch.units[(u + 1) % self.p.U].S

    def _state(self, u: int, place: Ref) -> Any:
        staged = self.scratch.units[u].S_stage
        return pltpu.make_async_copy(self._after(u) if staged is None else staged, place, self.scratch.S_sent.at[u])

    def _send_state(self, u: int) -> None:
        place, staged = self._state_place(u), self.scratch.units[u].S_stage
        if staged is not None:
            for i, S in head_states(self.p, self._after(u)):
                staged[i] = S
        self._state(u, place).start()

    def _send_given_state(self, u: int) -> None:
        assert self.inputs.S_first is not None
        place = self._state_place(u)
        copy = pltpu.make_async_copy(self.inputs.S_first[u].at[0], place, self.scratch.S_sent.at[u])
        copy.start()
        copy.wait()  # what it is sent from is about to be filled again
