"""The beginnings and ends of sequences: packed (cu_seqlens), segmented (segment_ids) or padded (mask), for any arrays.

All three are brought into one compacted order, in which the valid tokens of each sequence of a row are contiguous and
in order. ``Layout`` holds the permutations to that order and back. Padding tokens come after the valid tokens of their
sequence, where no causal computation reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .stages import Array, Namespace, device_of

__all__ = [
    "Layout",
    "Placed",
    "compact",
    "count_at_most",
    "index_range",
    "layout",
    "place",
    "restore",
    "segment_starts",
]


class Layout(NamedTuple):
    """The places of tokens. Arrays are [B, T] unless stated otherwise; order and back are None if no token moves.

    Attributes:
        order: for each compacted place, the token that goes there.
        back: for each token, its compacted place.
        sequence: for each compacted place, the row of the states that the token's sequence reads.
        position: for each compacted place, the index of the token in its segment.
        fresh: for each compacted place, whether the token's segment starts from zeros instead of the given state.
        first: [N], for each row of the states, the compacted place at which its last segment starts.
        length: [N], the number of valid tokens in that segment.
        restarted: [N], whether that segment started from zeros.
    """

    order: Array | None
    back: Array | None
    sequence: Array
    position: Array
    fresh: Array
    first: Array
    length: Array
    restarted: Array


def index_range(xp: Namespace, like: Array, stop: int) -> Array:
    """Return 0, 1, ..., stop - 1 as int32 on the device of ``like``."""
    return xp.arange(stop, dtype=xp.int32, **device_of(like))


def count_at_most(xp: Namespace, ascending: Array, values: Array) -> Array:
    """Count, for each of ``values`` [M], the entries of ``ascending`` [N] that are at most that value; int32 [M]."""
    if isinstance(ascending.shape[0], int) and isinstance(values.shape[0], int):
        return xp.astype(xp.searchsorted(ascending, values, side="right"), xp.int32)
    return xp.sum(xp.astype(ascending <= values[:, None], xp.int32), axis=1)  # for JAX's symbolic lengths


def _running_max(xp: Namespace, x: Array) -> Array:
    """Compute the cumulative maximum along the last dimension by doubling, as the array API has no function for it."""
    if not isinstance(x.shape[-1], int) and hasattr(xp.maximum, "accumulate"):  # one of JAX's symbolic lengths
        return xp.maximum.accumulate(x, axis=-1)
    step = 1
    while step < x.shape[-1]:
        x = xp.concat([x[..., :step], xp.maximum(x[..., step:], x[..., :-step])], axis=-1)
        step *= 2
    return x


def compact(xp: Namespace, x: Array, order: Array | None) -> Array:
    """Return tokens [B, T, ...] at their compacted places."""
    return x if order is None else x[index_range(xp, order, order.shape[0])[:, None], order]


restore = compact  # called with ``Layout.back``, since the inverse is a permutation too


class Placed(NamedTuple):
    """The sequences of a batch whose rows are laid end to end, as numpy arrays with one entry per sequence.

    Attributes:
        begin: the first token of the sequence.
        end: the token after its last one.
        state: the row of the given states that the sequence reads.
        fresh: whether the sequence starts from zeros instead.
        last: [N], for each row of the final states, the sequence that determines it.
    """

    begin: np.ndarray
    end: np.ndarray
    state: np.ndarray
    fresh: np.ndarray
    last: np.ndarray


def place(B: int, T: int, cu_seqlens: np.ndarray | None, starts: np.ndarray | None) -> Placed:
    """Locate the sequences of a batch: packed sequences, segments (``starts`` [B, T], see below) or whole rows."""
    if cu_seqlens is not None:
        bounds = np.clip(cu_seqlens, 0, T)
        every = np.arange(len(bounds) - 1)
        return Placed(bounds[:-1], np.maximum(bounds[1:], bounds[:-1]), every, np.zeros(len(every), bool), every)
    cuts = np.zeros((B, T), bool) if starts is None else starts.copy()
    cuts[:, 0] = True
    begin = np.flatnonzero(cuts)
    state = begin // T
    again = state[1:] == state[:-1]
    last = np.flatnonzero(np.append(~again, True))
    return Placed(begin, np.append(begin[1:], B * T), state, np.concatenate([[False], again]), last)


def segment_starts(xp: Namespace, segment_ids: Array, mask: Array | None) -> Array:
    """Return [B, T], true where a segment begins other than the first of its row.

    Masked tokens neither begin nor end a segment.
    """
    order = back = None
    if mask is not None:
        order = xp.argsort(xp.astype(xp.logical_not(mask), xp.int32), axis=-1, stable=True)
        back = xp.argsort(order, axis=-1, stable=True)
    ids = compact(xp, segment_ids, order)
    changed = xp.concat([xp.zeros_like(ids[:, :1], dtype=xp.bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    changed = restore(xp, changed, back)
    return changed if mask is None else changed & mask


def layout(
    xp: Namespace, like: Array, cu_seqlens: Array | None, segment_ids: Array | None, mask: Array | None
) -> Layout:
    """Compute the layout of a batch; ``like`` is any operand [B, T, ...] on the device where the layout is needed.

    At most one of cu_seqlens [N + 1] (with B = 1) and segment_ids [B, T] may be given.
    """
    B, T = like.shape[:2]
    token = xp.broadcast_to(index_range(xp, like, T)[None, :], (B, T))
    row = xp.broadcast_to(index_range(xp, like, B)[:, None], (B, T))
    if cu_seqlens is None:
        sequence, bounds = row, None
    else:
        bounds = xp.astype(cu_seqlens, xp.int32)
        # The sequence of token t is the number of boundaries at or before it (repeated ones are empty sequences).
        sequence = count_at_most(xp, bounds[1:], token[0])[None, :]
        sequence = xp.minimum(sequence, xp.zeros_like(sequence) + (bounds.shape[0] - 2))
    order = back = None
    valid = None
    if mask is not None:
        key = 2 * sequence + xp.astype(xp.logical_not(mask), xp.int32)
        order = xp.argsort(key, axis=-1, stable=True)
        back = xp.argsort(order, axis=-1, stable=True)
        sequence, valid = compact(xp, sequence, order), compact(xp, mask, order)
    if bounds is None:
        start = xp.zeros_like(token)
        if segment_ids is not None:
            ids = compact(xp, segment_ids, order)
            changed = xp.concat([xp.zeros_like(ids[:, :1], dtype=xp.bool), ids[:, 1:] != ids[:, :-1]], axis=1)
            changed = changed if valid is None else changed & valid
            start = _running_max(xp, xp.where(changed, token, xp.zeros_like(token)))
        begin = xp.zeros_like(row[:, 0])
        count = begin + T if valid is None else xp.astype(xp.sum(xp.astype(valid, xp.int32), axis=1), xp.int32)
        last = xp.maximum(count - 1, xp.zeros_like(count))
        first = start[index_range(xp, like, B), last]
        length = count - first
        fresh, restarted = start > 0, first > 0
    else:
        start = bounds[sequence]
        first = bounds[:-1]
        length = bounds[1:] - bounds[:-1]
        if valid is not None:
            each = sequence[0][:, None] == index_range(xp, like, bounds.shape[0] - 1)[None, :]
            length = xp.astype(xp.sum(xp.astype(each & valid[0][:, None], xp.int32), axis=0), xp.int32)
        fresh, restarted = xp.zeros_like(token, dtype=xp.bool), xp.zeros_like(first, dtype=xp.bool)
    return Layout(order, back, sequence, token - start, fresh, first, length, restarted)
