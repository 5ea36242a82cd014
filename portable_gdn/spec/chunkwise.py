"""The stages put together: one chunk forward, one chunk backward.

Drivers (a loop, a scan) belong to the backends; they call these two. The backward pass of one chunk is the
transpose of the forward by hand; ``math`` names follow ``docs/algorithm.md``. Shapes as in ``stages``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import stages as st
from .stages import Array, Namespace, Product

__all__ = ["ChunkGradients", "Saved", "backward_chunk", "forward_chunk", "stage_chunk"]


Decay = Callable[..., tuple[Array, Array]]


class Saved(NamedTuple):
    """What the backward pass of a chunk needs beside its operands."""

    T: Array | None
    Aqk: Array
    Vn: Array


class ChunkGradients(NamedTuple):
    """Cotangents of a chunk's operands, of the shapes that the broadcast operands have; g at a reset is exactly 0."""

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array | None
    w: Array | None
    S: Array


def forward_chunk(
    xp: Namespace,
    mm: Product,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array | None,
    w: Array | None,
    S: Array,
    scale: float,
    starts: Array | None = None,
    decay: Decay = st.decay,
) -> tuple[Array, Array, Saved]:
    """One chunk: o [C, V], the state after it [K, V], and what the backward pass needs."""
    G, count = decay(xp, g, starts)
    Akk, Aqk = st.scores(xp, mm, q, k, b, G, count, scale)
    T = None if Akk is None else st.inverse(xp, mm, Akk)
    Vn = st.delta_direct(xp, mm, T, k, v, b, w, G, count, S)
    o = st.output(xp, mm, q, Aqk, Vn, G, count, S, scale)
    return o, st.state(xp, mm, k, Vn, G, count, S), Saved(T, Aqk, Vn)


def stage_chunk(
    xp: Namespace,
    mm: Product,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array | None,
    w: Array | None,
    S: Array,
    scale: float,
    starts: Array | None = None,
    stages: Any = st,
    direct: bool = False,
) -> dict[str, tuple[Array | None, ...]]:
    """One chunk by all seven stages, each result under its name; ``state`` holds (S before, S after).

    ``direct``: Vn straight from the state, as ``forward_chunk`` solves it; U and W are then what its solver would give.
    """
    G, count = stages.decay(xp, g, starts)
    Akk, Aqk = stages.scores(xp, mm, q, k, b, G, count, scale)
    T = None if Akk is None else stages.inverse(xp, mm, Akk)
    U, W = stages.wy(xp, mm, T, k, v, b, w, G, count)
    Vn = st.delta_direct(xp, mm, T, k, v, b, w, G, count, S) if direct else stages.delta(xp, mm, U, W, S)
    o = stages.output(xp, mm, q, Aqk, Vn, G, count, S, scale)
    after = stages.state(xp, mm, k, Vn, G, count, S)
    return {
        "decay": (G, count),
        "scores": (Akk, Aqk),
        "inverse": (T,),
        "wy": (U, W),
        "state": (S, after),
        "delta": (Vn,),
        "output": (o,),
    }


def backward_chunk(
    xp: Namespace,
    mm: Product,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array | None,
    w: Array | None,
    S: Array,
    scale: float,
    saved: Saved,
    dO: Array,
    dS: Array,
    starts: Array | None = None,
    decay: Decay = st.decay,
    stored: Callable[[Array, str], Array] = lambda x, name: x,
) -> ChunkGradients:
    """The cotangents of one chunk's operands from those of its output dO [C, V] and of the state after it dS [K, V].

    ``stored``: what is left of S or dS, named so, where they are read back outside of a product.
    """
    T, Aqk, Vn = saved
    channels = k.shape[-1]
    tr = lambda x: st.transpose(xp, x)  # noqa: E731
    G, count = decay(xp, g, starts)
    begin = st.to_channels(xp, st.from_start(xp, G, count), channels)
    end = st.to_channels(xp, st.to_end(xp, G, count), channels)
    kept = tr(st.to_channels(xp, st.across(xp, G, count), channels))
    e = None if b is None else b * k

    dVn = mm(tr(Aqk), dO, "Aqk", "dO") + mm(k * end, dS, "k", "dS")
    X = dVn if T is None else mm(tr(T), dVn, "T", "dVn")
    dAqk = mm(dO, tr(Vn), "dO", "Vn")  # of these only the lower triangle counts: the decays mask them
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

    # dg_t gathers all that decays across t: pairs i >= t > j, the state at the start read at i >= t, the state at the
    # end written at j < t, and the state that passes through. Each is summed on its own side of t, so that nothing
    # cancels: under strong decays the true dg is far smaller than q dq or k dk.
    dq, de, dk, dg = _pair_gradients(xp, mm, q, k, e, G, count, scale, dAqk, dAkk)
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
    """Sum over the channels where the gate has one value a head."""
    return xp.sum(x, axis=-1, keepdims=True) if gate.shape[-1] == 1 else x


def _from_here_on(xp: Namespace, x: Array) -> Array:
    """At each token the sum of x [..., C, n] over that and later tokens."""
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=-2), axis=-2), axis=-2)


def _before(xp: Namespace, x: Array) -> Array:
    """At each token the sum of x [..., C, n] over earlier tokens."""
    total = xp.cumulative_sum(x, axis=-2)
    return xp.concat([xp.zeros_like(x[..., :1, :]), total[..., :-1, :]], axis=-2)


def _pair_gradients(
    xp: Namespace,
    mm: Product,
    q: Array,
    k: Array,
    e: Array | None,
    G: Array,
    count: Array,
    scale: float,
    dAqk: Array,
    dAkk: Array | None,
) -> tuple[Array, Array | None, Array, Array]:
    """What the scores' cotangents give to q, e and k [C, K], and to the decays between their rows [C, n]."""
    if st.by_channel(k, G):
        return _channel_pair_gradients(xp, mm, q, k, e, G, count, scale, dAqk, dAkk)
    tr = lambda x: st.transpose(xp, x)  # noqa: E731
    D = st.pair_decay(xp, G, count)
    groups = G.shape[-1]
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
    # Over each row the pairs with an earlier column, then over this and later rows.
    total = xp.cumulative_sum(xp.where(strict, pairs, 0.0), axis=-1)
    earlier = xp.concat([xp.zeros_like(total[..., :1]), total[..., :-1]], axis=-1)
    dg = xp.sum(xp.where(st.lower_triangle(xp, D, strict=False), earlier, 0.0), axis=-2)
    dg = dg[..., None] if groups == 1 else tr(dg)
    return join(dq), de, join(dk), dg


def _channel_pair_gradients(
    xp: Namespace,
    mm: Product,
    q: Array,
    k: Array,
    e: Array | None,
    G: Array,
    count: Array,
    scale: float,
    dAqk: Array,
    dAkk: Array | None,
) -> tuple[Array, Array | None, Array, Array]:
    """The same for decays by channel, over the hierarchy of ``stages.channel_scores``."""
    same = scale * xp.linalg.diagonal(dAqk)[..., None]
    dq, dk, de, dg = same * k, same * q, None, xp.zeros_like(G)
    rows = [(q, st.lower_blocks(xp, scale * dAqk), "q")]
    if e is not None and dAkk is not None:
        rows.append((e, st.lower_blocks(xp, dAkk), "k"))
        de = xp.zeros_like(dq)
    size = 1
    while size < k.shape[-2]:
        to_last, from_last = st.channel_factors(xp, G, count, size)
        left = st.halves(xp, k, size)[0]
        keys = left * to_last
        to_keys, read = None, None
        for i, (x, corners, name) in enumerate(rows):
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
        # A decay in the left block lies between its earlier keys and all rows of the right; and the other way round.
        dg = dg + _spread(xp, _before(xp, left * to_keys), _from_here_on(xp, read))
        size *= 2
    return dq, de, dk, dg


def _spread(xp: Namespace, left: Array | None, right: Array | None) -> Array:
    """Left and right blocks of pairs [C / 2 size, size, K] back at their rows [C, K]; a missing side is zeros."""
    left = xp.zeros_like(right) if left is None else left
    right = xp.zeros_like(left) if right is None else right
    x = xp.stack([left, right], axis=-3)
    return xp.reshape(x, (*x.shape[:-4], x.shape[-4] * 2 * x.shape[-2], x.shape[-1]))
