"""How sequences are cut at resets. Plain numpy, on the host.

FLA sums gates over a chunk, and a gate of -inf makes NaN of the sum. So a sequence is cut at every token that holds a
reset: there a new piece begins, whose first gate is 0 and whose state is zeroed where the reset was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..spec.sequences import Placed

__all__ = ["Pieces", "cut_heads_apart", "cut_in_turn", "whole"]


class Pieces(NamedTuple):
    """Runs of tokens in rows laid end to end; numpy arrays, one entry a piece.

    begin, end: its tokens, possibly none.
    state: row of the states that it reads; fresh: whether it starts from zeros instead.
    """

    begin: np.ndarray
    end: np.ndarray
    state: np.ndarray
    fresh: np.ndarray


def whole(sequences: Placed) -> Pieces:
    """Every sequence one piece."""
    return Pieces(sequences.begin, sequences.end, sequences.state, sequences.fresh)


def cut_heads_apart(sequences: Placed, reset: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """Pieces of heads laid end to end, for resets [tokens, heads]; and the last piece of each (sequence, head).

    A piece behind a reset owes nothing to what came before it, so all run at once, however many there are. State rows
    are those of (sequence, head), flattened.
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
    """Turns of pieces of different sequences, for tokens [tokens] that reset some channels only.

    A piece starts from what the piece before it left in the other channels, so those of one sequence run in turn;
    their ``state`` is the sequence.
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
