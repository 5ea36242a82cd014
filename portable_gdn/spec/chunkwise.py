"""The stages put together: one chunk forward, one chunk backward.

Drivers (a loop, a scan) belong to the backends; they call these two. The backward pass of one chunk is the
transpose of the forward by hand; ``math`` names follow ``docs/algorithm.md``. Shapes as in ``stages``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import stages as st
from .stages import Array, Namespace, Product

__all__ = ["ChunkGradients", "Saved", "backward_chunk", "forward_chunk", "stage_chunk"]


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
    xp: Namespace, mm: Product, q: Array, k: Array, v: Array, g: Array, b: Array | None, w: Array | None,
    S: Array, scale: float, starts: Array | None = None,
) -> tuple[Array, Array, Saved]:
    """One chunk: o [C, V], the state after it [K, V], and what the backward pass needs."""
    G, count = st.decay(xp, g, starts)
    Akk, Aqk = st.scores(xp, mm, q, k, b, G, count, scale)
    T = None if Akk is None else st.inverse(xp, mm, Akk)
    Vn = st.delta_direct(xp, mm, T, k, v, b, w, G, count, S)
    o = st.output(xp, mm, q, Aqk, Vn, G, count, S, scale)
    return o, st.state(xp, mm, k, Vn, G, count, S), Saved(T, Aqk, Vn)


def stage_chunk(
    xp: Namespace, mm: Product, q: Array, k: Array, v: Array, g: Array, b: Array | None, w: Array | None,
    S: Array, scale: float, starts: Array | None = None, stages: Any = st,
) -> dict[str, tuple[Array | None, ...]]:
    """One chunk by all seven stages, each result under its name; ``state`` holds (S before, S after)."""
    G, count = stages.decay(xp, g, starts)
    Akk, Aqk = stages.scores(xp, mm, q, k, b, G, count, scale)
    T = None if Akk is None else stages.inverse(xp, mm, Akk)
    U, W = stages.wy(xp, mm, T, k, v, b, w, G, count)
    Vn = stages.delta(xp, mm, U, W, S)
    o = stages.output(xp, mm, q, Aqk, Vn, G, count, S, scale)
    after = stages.state(xp, mm, k, Vn, G, count, S)
    return {
        "decay": (G, count), "scores": (Akk, Aqk), "inverse": (T,), "wy": (U, W), "state": (S, after),
        "delta": (Vn,), "output": (o,),
    }


def backward_chunk(
    xp: Namespace, mm: Product, q: Array, k: Array, v: Array, g: Array, b: Array | None, w: Array | None,
    S: Array, scale: float, saved: Saved, dO: Array, dS: Array, starts: Array | None = None,
) -> ChunkGradients:
    """The cotangents of one chunk's operands from those of its output dO [C, V] and of the state after it dS [K, V]."""
    T, Aqk, Vn = saved
    channels = k.shape[-1]
    tr = lambda x: st.transpose(xp, x)  # noqa: E731
    G, count = st.decay(xp, g, starts)
    begin = st.to_channels(xp, st.from_start(xp, G, count), channels)
    end = st.to_channels(xp, st.to_end(xp, G, count), channels)
    kept = tr(st.to_channels(xp, st.across(xp, G, count), channels))
    e = None if b is None else b * k

    dVn = mm(tr(Aqk), dO, "Aqk", "dO") + mm(k * end, dS, "k", "dS")
    X = dVn if T is None else mm(tr(T), dVn, "T", "dVn")
    # Only the lower triangle counts; multiplying by the decays (0 above it) masks both.
    dAqk = mm(dO, tr(Vn), "dO", "Vn")
    dAkk = None if e is None else -mm(X, tr(Vn), "X", "Vn")

    dS0 = kept * dS + mm(tr(scale * q * begin), dO, "q", "dO")
    dq = scale * begin * mm(dO, tr(S), "dO", "S")
    dk_state = end * mm(Vn, tr(dS), "Vn", "dS")
    de = None
    if e is not None:
        dS0 = dS0 - mm(tr(e * begin), X, "k", "X")
        de = -begin * mm(X, tr(S), "X", "S")

    pairs_q, pairs_e, pairs_k = _pair_gradients(xp, mm, q, k, e, G, count, scale, dAqk, dAkk)
    dq = dq + pairs_q
    dk = dk_state + pairs_k

    dG = q * dq - k * dk
    if e is not None and de is not None and pairs_e is not None:
        de = de + pairs_e
        dG = dG + e * de
    groups = g.shape[-1]
    through_state = st.over_groups(xp, tr(kept * xp.sum(S * dS, axis=-1, keepdims=True)), groups)
    last = through_state + xp.sum(st.over_groups(xp, k * dk_state, groups), axis=-2, keepdims=True)
    dg = _suffix_sum(xp, st.over_groups(xp, dG, groups), last, g, starts)

    dw = None if w is None else _like_gate(xp, X * v, w)
    dv = X if w is None else X * w
    db = None
    if de is not None and b is not None:
        db = _like_gate(xp, de * k, b)
        dk = dk + de * b
    return ChunkGradients(dq, dk, dv, dg, db, dw, dS0)


def _like_gate(xp: Namespace, x: Array, gate: Array) -> Array:
    """Sum over the channels where the gate has one value a head."""
    return xp.sum(x, axis=-1, keepdims=True) if gate.shape[-1] == 1 else x


def _suffix_sum(xp: Namespace, dG: Array, last: Array, g: Array, starts: Array | None) -> Array:
    """dg_t = sum of dG over the tokens from t on, ``last`` added to the last token; exactly 0 at a reset."""
    dG = xp.concat([dG[..., :-1, :], dG[..., -1:, :] + last], axis=-2)
    if starts is None:
        dg = xp.flip(xp.cumulative_sum(xp.flip(dG, axis=-2), axis=-2), axis=-2)
        return xp.where(g < st.RESET, xp.zeros_like(dg), dg)
    dg = st.segmented_sum(xp, dG, starts, reverse=True)
    return xp.where((g < st.RESET) | starts, xp.zeros_like(dg), dg)


def _pair_gradients(
    xp: Namespace, mm: Product, q: Array, k: Array, e: Array | None, G: Array, count: Array, scale: float,
    dAqk: Array, dAkk: Array | None,
) -> tuple[Array, Array | None, Array]:
    """What the scores' cotangents give to q, e and k. [C, K] each."""
    if st.by_channel(k, G):
        return _channel_pair_gradients(xp, mm, q, k, e, G, count, scale, dAqk, dAkk)
    tr = lambda x: st.transpose(xp, x)  # noqa: E731
    D = st.pair_decay(xp, G, count)
    groups = G.shape[-1]
    if groups == 1:
        D = D[..., 0, :, :]
        split = join = lambda x: x  # noqa: E731
    else:
        dAqk, dAkk = dAqk[..., None, :, :], None if dAkk is None else dAkk[..., None, :, :]
        split = lambda x: st.split_groups(xp, x, groups)  # noqa: E731
        join = lambda x: st.join_groups(xp, x)  # noqa: E731
    dAqk = scale * dAqk * D
    dq = join(mm(dAqk, split(k), "dA", "k"))
    dk = mm(tr(dAqk), split(q), "dA", "q")
    if e is None or dAkk is None:
        return dq, None, join(dk)
    dAkk = xp.where(st.lower_triangle(xp, k, strict=True), dAkk * D, 0.0)
    de = join(mm(dAkk, split(k), "dA", "k"))
    return dq, de, join(dk + mm(tr(dAkk), split(e), "dA", "k"))


def _channel_pair_gradients(
    xp: Namespace, mm: Product, q: Array, k: Array, e: Array | None, G: Array, count: Array, scale: float,
    dAqk: Array, dAkk: Array | None,
) -> tuple[Array, Array | None, Array]:
    """The same for decays by channel, over the hierarchy of ``stages.channel_scores``."""
    same = scale * xp.linalg.diagonal(dAqk)[..., None]
    dq, dk, de = same * k, same * q, None
    rows = [(q, st.lower_blocks(xp, scale * dAqk), "q")]
    if e is not None and dAkk is not None:
        rows.append((e, st.lower_blocks(xp, dAkk), "k"))
    size = 1
    while size < k.shape[-2]:
        to_last, from_last = st.channel_factors(xp, G, count, size)
        keys = st.halves(xp, k, size)[0] * to_last
        to_keys = None
        for i, (x, corners, name) in enumerate(rows):
            corner = corners[size.bit_length() - 1]
            to_rows = _spread(xp, None, mm(corner, keys, "dA", "k") * from_last)
            if i == 0:
                dq = dq + to_rows
            else:
                de = to_rows if de is None else de + to_rows
            new = mm(st.transpose(xp, corner), st.halves(xp, x, size)[1] * from_last, "dA", name)
            to_keys = new if to_keys is None else to_keys + new
        dk = dk + _spread(xp, to_keys * to_last, None)
        size *= 2
    if e is not None and de is None:  # a chunk of one token has no pairs
        de = xp.zeros_like(dq)
    return dq, de, dk


def _spread(xp: Namespace, left: Array | None, right: Array | None) -> Array:
    """Left or right blocks of pairs [C / 2 size, size, K] back at their rows [C, K], zeros in the others."""
    blocks = left if left is not None else right
    zeros = xp.zeros_like(blocks)
    x = xp.stack([left, zeros] if left is not None else [zeros, right], axis=-3)
    return xp.reshape(x, (*x.shape[:-4], x.shape[-4] * 2 * x.shape[-2], x.shape[-1]))
