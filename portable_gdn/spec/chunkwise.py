"""The forward and the backward pass of one chunk, composed of the stages.

Each backend has its own driver (a loop or a scan), which calls these two functions. The backward pass of a chunk is the
transpose of the forward pass, derived by hand. Names follow ``docs/algorithm.md``, and shapes follow ``stages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import stages as st
from .stages import Algebra, Array, Decays, Namespace

__all__ = ["ChunkGradients", "ChunkOperands", "Saved", "backward_chunk", "forward_chunk", "stage_chunk"]

#: A function that sums the log decays of a chunk, given the namespace, g and starts, as ``stages.decay`` does.
Decay = Callable[..., Decays]


class ChunkOperands(NamedTuple):
    """The operands of one chunk of C tokens. Leading dimensions are arbitrary and broadcast.

    Attributes:
        q, k: [C, K].
        v: [C, V].
        g: log decay [C, n].
        b: erase gate [C, 1 or K]; None erases nothing.
        w: write gate [C, 1 or V]; None means 1.
        S: the state at the start of the chunk, [K, V].
        starts: boolean [C, 1], True at the first token of a new segment, or None.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array | None
    w: Array | None
    S: Array
    starts: Array | None = None

    @property
    def rows(self) -> tuple[Array, Array, Array, Array, Array | None, Array | None]:
        """The operands with a row for each token: q, k, v, g, b and w."""
        return self[:6]

    @classmethod
    def of(cls, rows: Iterable[Array | None], S: Array, starts: Array | None = None) -> ChunkOperands:
        """Make the operands from q, k, v, g, b and w in this order, the state, and the starts of segments."""
        q, k, v, g, b, w = rows
        return cls(q, k, v, g, b, w, S, starts)


class Saved(NamedTuple):
    """The values that the backward pass of a chunk needs in addition to its operands."""

    T: Array | None
    Aqk: Array
    Vn: Array


class ChunkGradients(NamedTuple):
    """The cotangents of a chunk's operands, in the operands' broadcast shapes; that of g at a reset is exactly 0."""

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array | None
    w: Array | None
    S: Array


def forward_chunk(
    algebra: Algebra, x: ChunkOperands, scale: float, decay: Decay = st.decay
) -> tuple[Array, Array, Saved]:
    """Compute one chunk: its outputs o [C, V], the state after it [K, V], and the values kept for the backward pass."""
    q, k, v, g, b, w, S, starts = x
    decays = decay(algebra.xp, g, starts)
    Akk, Aqk = st.scores(algebra, q, k, b, decays, scale)
    T = None if Akk is None else st.inverse(algebra, Akk)
    Vn = st.delta_direct(algebra, T, k, v, b, w, decays, S)
    o = st.output(algebra, q, Aqk, Vn, decays, S, scale)
    return o, st.state(algebra, k, Vn, decays, S), Saved(T, Aqk, Vn)


def stage_chunk(
    algebra: Algebra, x: ChunkOperands, scale: float, stages: Any = st, direct: bool = False
) -> dict[str, tuple[Array | None, ...]]:
    """Compute one chunk by all seven stages, and return the results by the stage's name.

    The results of the stage ``state`` are (S before, S after).

    Args:
        algebra: the array namespace and the matrix product to use.
        x: the operands of the chunk.
        scale: the factor of the queries.
        stages: a module with the functions of ``stages``; tests pass one with a fault in it.
        direct: whether Vn is solved directly from the state, as in ``forward_chunk``; U and W are then the results that
            its solver would give.
    """
    q, k, v, g, b, w, S, starts = x
    decays = stages.decay(algebra.xp, g, starts)
    Akk, Aqk = stages.scores(algebra, q, k, b, decays, scale)
    T = None if Akk is None else stages.inverse(algebra, Akk)
    U, W = stages.wy(algebra, T, k, v, b, w, decays)
    Vn = st.delta_direct(algebra, T, k, v, b, w, decays, S) if direct else stages.delta(algebra, U, W, S)
    o = stages.output(algebra, q, Aqk, Vn, decays, S, scale)
    after = stages.state(algebra, k, Vn, decays, S)
    return {
        "decay": tuple(decays),
        "scores": (Akk, Aqk),
        "inverse": (T,),
        "wy": (U, W),
        "state": (S, after),
        "delta": (Vn,),
        "output": (o,),
    }


def backward_chunk(
    algebra: Algebra,
    x: ChunkOperands,
    scale: float,
    saved: Saved,
    dO: Array,
    dS: Array,
    decay: Decay = st.decay,
    stored: Callable[[Array, str], Array] = lambda x, name: x,
) -> ChunkGradients:
    """Compute the cotangents of a chunk's operands from those of its outputs, dO [C, V], and its last state, dS [K, V].

    Args:
        algebra: the array namespace and the matrix product to use.
        x: the operands of the chunk.
        scale: the factor of the queries.
        saved: the values that ``forward_chunk`` kept.
        dO: the cotangent of the outputs.
        dS: the cotangent of the state after the chunk.
        decay: sums the log decays of the chunk.
        stored: rounds S or dS (named in its second argument) as a backend stores them, where they are used outside of a
            product.
    """
    xp, mm = algebra
    q, k, v, g, b, w, S, starts = x
    T, Aqk, Vn = saved
    channels = k.shape[-1]
    tr = lambda x: st.transpose(xp, x)  # noqa: E731
    decays = decay(xp, g, starts)
    begin = st.to_channels(xp, st.from_start(xp, decays), channels)
    end = st.to_channels(xp, st.to_end(xp, decays), channels)
    kept = tr(st.to_channels(xp, st.across(xp, decays), channels))
    e = None if b is None else b * k

    dVn = mm(tr(Aqk), dO, "Aqk", "dO") + mm(k * end, dS, "k", "dS")
    X = dVn if T is None else mm(tr(T), dVn, "T", "dVn")
    dAqk = mm(dO, tr(Vn), "dO", "Vn")  # only the lower triangle counts: the decays mask the rest
    dAkk = None if e is None else -mm(X, tr(Vn), "X", "Vn")

    dS0 = kept * dS + mm(tr(scale * q * begin), dO, "q", "dO")
    dq_state = scale * begin * mm(dO, tr(S), "dO", "S")
    dk_state = end * mm(Vn, tr(dS), "Vn", "dS")
    read = q * dq_state
    de_state = None
    if e is not None:
        dS0 = dS0 - mm(tr(e * begin), X, "k", "X")
        de_state = -begin * mm(X, tr(S), "X", "S")
        read = read + e * de_state

    # dg_t sums everything that decays across t: pairs i >= t > j, the initial state read at i >= t, the final state
    # written at j < t, and the state that passes through. Each is summed on its own side of t, so that nothing cancels:
    # under strong decays the true dg is far smaller than q dq or k dk.
    dq, de, dk, dg = _pair_gradients(algebra, _Rows(q, k, e), decays, scale, dAqk, dAkk)
    groups = g.shape[-1]
    passing = kept * xp.sum(stored(S, "S") * stored(dS, "dS"), axis=-1, keepdims=True)
    through = st.over_groups(xp, tr(passing), groups)
    dg = (
        dg
        + through
        + _from_here_on(xp, st.over_groups(xp, read, groups))
        + _before(xp, st.over_groups(xp, k * dk_state, groups))
    )
    off = g < st.RESET if starts is None else (g < st.RESET) | starts
    dg = xp.where(off, xp.zeros_like(dg), dg)

    dq, dk = dq + dq_state, dk + dk_state
    db = None
    if b is not None and de is not None and de_state is not None:
        de = de + de_state
        db = _like_gate(xp, de * k, b)
        dk = dk + de * b
    dw = None if w is None else _like_gate(xp, X * v, w)
    return ChunkGradients(dq, dk, X if w is None else X * w, dg, db, dw, dS0)


def _like_gate(xp: Namespace, x: Array, gate: Array) -> Array:
    """Sum x over the channels if the gate has one value per head."""
    return xp.sum(x, axis=-1, keepdims=True) if gate.shape[-1] == 1 else x


def _from_here_on(xp: Namespace, x: Array) -> Array:
    """Sum x [..., C, n] at each token over that token and all later ones."""
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=-2), axis=-2), axis=-2)


def _before(xp: Namespace, x: Array) -> Array:
    """Sum x [..., C, n] at each token over all earlier tokens."""
    total = xp.cumulative_sum(x, axis=-2)
    return xp.concat([xp.zeros_like(x[..., :1, :]), total[..., :-1, :]], axis=-2)


class _Rows(NamedTuple):
    """The rows that the scores multiply, each [C, K]: queries, keys, and keys times the erase gate if there is one."""

    q: Array
    k: Array
    e: Array | None


def _pair_gradients(
    algebra: Algebra, rows: _Rows, decays: Decays, scale: float, dAqk: Array, dAkk: Array | None
) -> tuple[Array, Array | None, Array, Array]:
    """Compute the parts of the cotangents of q, e and k [C, K] and of the decays [C, n] that come from the scores."""
    xp, mm = algebra
    q, k, e = rows
    if st.by_channel(k, decays):
        return _channel_pair_gradients(algebra, rows, decays, scale, dAqk, dAkk)
    tr = lambda x: st.transpose(xp, x)  # noqa: E731
    D = st.pair_decay(xp, decays)
    groups = decays.sum.shape[-1]
    strict = st.lower_triangle(xp, k, strict=True)
    if groups == 1:
        D = D[..., 0, :, :]
        split = join = lambda x: x
    else:
        dAqk, dAkk = dAqk[..., None, :, :], None if dAkk is None else dAkk[..., None, :, :]
        split = lambda x: st.split_groups(xp, x, groups)  # noqa: E731
        join = lambda x: st.join_groups(xp, x)  # noqa: E731
    q, k, e = split(q), split(k), None if e is None else split(e)
    dAqk = scale * dAqk * D
    dq = mm(dAqk, k, "dA", "k")
    dk = mm(tr(dAqk), q, "dA", "q")
    pairs = dAqk * mm(q, tr(k), "q", "k")
    de = None
    if e is not None and dAkk is not None:
        dAkk = xp.where(strict, dAkk * D, 0.0)
        de = join(mm(dAkk, k, "dA", "k"))
        dk = dk + mm(tr(dAkk), e, "dA", "k")
        pairs = pairs + dAkk * mm(e, tr(k), "k", "k")
    # For each row, sum over the pairs with an earlier column, then over this row and later ones.
    total = xp.cumulative_sum(xp.where(strict, pairs, 0.0), axis=-1)
    earlier = xp.concat([xp.zeros_like(total[..., :1]), total[..., :-1]], axis=-1)
    dg = xp.sum(xp.where(st.lower_triangle(xp, D, strict=False), earlier, 0.0), axis=-2)
    dg = dg[..., None] if groups == 1 else tr(dg)
    return join(dq), de, join(dk), dg


def _channel_pair_gradients(
    algebra: Algebra, rows: _Rows, decays: Decays, scale: float, dAqk: Array, dAkk: Array | None
) -> tuple[Array, Array | None, Array, Array]:
    """Compute ``_pair_gradients`` for decays per channel, over the hierarchy of blocks of ``stages.channel_scores``."""
    xp, mm = algebra
    q, k, e = rows
    same = scale * xp.linalg.diagonal(dAqk)[..., None]
    dq, dk, de, dg = same * k, same * q, None, xp.zeros_like(decays.sum)
    pairs = [(q, st.lower_blocks(xp, scale * dAqk), "q")]
    if e is not None and dAkk is not None:
        pairs.append((e, st.lower_blocks(xp, dAkk), "k"))
        de = xp.zeros_like(dq)
    size = 1
    while size < k.shape[-2]:
        to_last, from_last = st.channel_factors(xp, decays, size)
        left = st.halves(xp, k, size)[0]
        keys = left * to_last
        to_keys, read = None, None
        for i, (x, corners, name) in enumerate(pairs):
            corner, right = corners[size.bit_length() - 1], st.halves(xp, x, size)[1]
            to_rows = mm(corner, keys, "dA", "k") * from_last
            if i == 0:
                dq = dq + _spread(xp, None, to_rows)
            else:
                de = de + _spread(xp, None, to_rows)
            new = mm(st.transpose(xp, corner), right * from_last, "dA", name)
            to_keys = new if to_keys is None else to_keys + new
            read = right * to_rows if read is None else read + right * to_rows
        to_keys = to_keys * to_last
        dk = dk + _spread(xp, to_keys, None)
        # A decay in the left block lies between its earlier keys and all rows of the right block, and vice versa.
        dg = dg + _spread(xp, _before(xp, left * to_keys), _from_here_on(xp, read))
        size *= 2
    return dq, de, dk, dg


def _spread(xp: Namespace, left: Array | None, right: Array | None) -> Array:
    """Put left and right blocks of pairs [C / 2 size, size, K] back at their rows [C, K]; a missing side is zeros."""
    left = xp.zeros_like(right) if left is None else left
    right = xp.zeros_like(left) if right is None else right
    x = xp.stack([left, right], axis=-3)
    return xp.reshape(x, (*x.shape[:-4], x.shape[-4] * 2 * x.shape[-2], x.shape[-1]))
