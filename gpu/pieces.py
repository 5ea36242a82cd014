"""The cutting of sequences at resets, in numpy on the host.

FLA sums gates over a chunk, and a gate of -inf would make the sum NaN. A sequence is therefore cut at every token with
a reset: a new piece begins there, whose first gate is 0 and whose state is set to zero where the reset was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..spec.sequences import Placed

__all__ = ["Pieces", "cut_heads_apart", "cut_in_turn", "whole"]


class Pieces(NamedTuple):
    """Contiguous tokens of rows laid end to end, as numpy arrays with one entry per piece.

    Attributes:
        begin: the first token of the piece.
        end: the token after its last one; equal to ``begin`` if the piece is empty.
        state: the row of the states that it reads.
        fresh: whether it starts from zeros instead.
    """

    begin: np.ndarray
    end: np.ndarray
    state: np.ndarray
    fresh: np.ndarray


def whole(sequences: Placed) -> Pieces:
    """Return every sequence as one piece."""
    return Pieces(sequences.begin, sequences.end, sequences.state, sequences.fresh)


def cut_heads_apart(sequences: Placed, reset: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """Cut heads laid end to end at their resets [tokens, heads].

    A piece after a reset does not depend on anything before it, so all pieces run at once, however many there are.

    Returns:
        The pieces, whose rows of states are those of (sequence, head), flattened; and the last piece of each of these.
    """
    tokens, heads = reset.shape
    rows: list[tuple[int, int, int, bool]] = []
    last = np.zeros((len(sequences.begin), heads), np.int64)
    for h in range(heads):
        for i, (b, e) in enumerate(zip(sequences.begin.tolist(), sequences.end.tolist(), strict=True)):
            at = (b + np.flatnonzero(reset[b:e, h])).tolist()
            starts = at if at[:1] == [b] else [b, *at]
            for first, stop in zip(starts, [*starts[1:], e], strict=True):
                fresh = bool(sequences.fresh[i]) or (first < stop and bool(reset[first, h]))
                rows.append((h * tokens + first, h * tokens + stop, i * heads + h, fresh))
            last[i, h] = len(rows) - 1
    return Pieces(*(np.array(column) for column in zip(*rows, strict=True))), last.reshape(-1)


def cut_in_turn(sequences: Placed, reset: np.ndarray) -> list[Pieces]:
    """Cut sequences at tokens [tokens] that reset only some channels.

    A piece starts from the state that the piece before it left in the other channels, so the pieces of one sequence run
    one after another.

    Returns:
        The turns, each with at most one piece of every sequence; the ``state`` of a piece is its sequence.
    """
    cuts = []
    for b, e in zip(sequences.begin.tolist(), sequences.end.tolist(), strict=True):
        inside = b + 1 + np.flatnonzero(reset[b + 1 : e])  # a reset at the first token needs no cut
        cuts.append(np.concatenate([[b], inside, [e]]) if b < e else np.array([b]))
    turns = []
    for turn in range(max(map(len, cuts), default=1) - 1):
        here = np.array([i for i, c in enumerate(cuts) if turn + 1 < len(c)])
        begin, end = (np.array([cuts[i][turn + n] for i in here]) for n in (0, 1))
        turns.append(Pieces(begin, end, here, np.zeros(len(here), bool)))
    return turns
