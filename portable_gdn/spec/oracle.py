"""The rule token by token in float64, with exact gradients, against which every backend is judged.

Forward, per value head (math in ``docs/algorithm.md``):

    S~ = diag(exp g_t) S;  r = w_t * v_t - S~^T e_t;  S <- S~ + k_t r^T;  o_t = scale S^T q_t;  e = b * k

Backward, the adjoint recurrence, from the last token to the first, dS being the cotangent of the state after it:

    dS <- dS + scale q_t do_t^T;   dq = scale S do_t;   dr = dS^T k_t;   dk' = dS r;   dw = dr * v;   dv = dr * w
    de = -S~ dr;   db = de * k;   dk = dk' + de * b;   dS~ = dS - e dr^T;   dg = rowsum(S~ * dS~);   dS <- exp(g) dS~

Each result comes with the size of its summands before they cancel. A float32 computation is judged by that size where
the true result is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from .stages import RESET

__all__ = ["Core", "CoreGradients", "CoreResult", "CoreRule", "OutputCotangent", "output_cotangent", "token_by_token"]


class Core(NamedTuple):
    """The operands of one sequence of T tokens, with H key heads and R value heads per key head first.

    Attributes:
        q, k: [H, 1, T, K].
        v: [H, R, T, V].
        g: log decay [H, R, T, n].
        b: erase gate [H, R, T, 1 or K]; None erases nothing.
        w: write gate [H, R, T, 1 or V]; None writes everything.
        S: the state before the first token, [H, R, K, V].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    b: np.ndarray | None
    w: np.ndarray | None
    S: np.ndarray


class CoreGradients(NamedTuple):
    """The cotangents of the operands, in the operands' shapes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    b: np.ndarray | None
    w: np.ndarray | None
    S: np.ndarray


class CoreResult(NamedTuple):
    """The results of one sequence: o [H, R, T, V], the final state S [H, R, K, V], and the sizes of their summands.

    The gradients are None unless cotangents were given.
    """

    o: np.ndarray
    S: np.ndarray
    gradients: CoreGradients | None = None
    o_size: np.ndarray | None = None
    S_size: np.ndarray | None = None
    gradient_sizes: CoreGradients | None = None


OutputCotangent = np.ndarray | Callable[[np.ndarray, slice], np.ndarray]
"""The cotangent of o [H, R, T, V], or, for an output norm, a function that returns it for the o of some key heads."""

CoreRule = Callable[[Core, float, "OutputCotangent | None", "np.ndarray | None"], CoreResult]
"""A function that computes one sequence from (operands, scale, dO or None, dS or None)."""

_LARGEST = 32_000_000  # elements of saved states; above this, key heads are computed one by one


def output_cotangent(dO: OutputCotangent, o: np.ndarray, heads: slice = slice(None)) -> np.ndarray:
    """Return the cotangent [H, R, T, V] of the outputs o of some key heads."""
    return dO(o, heads) if callable(dO) else dO[heads]


def token_by_token(
    x: Core, scale: float, dO: OutputCotangent | None = None, dS: np.ndarray | None = None
) -> CoreResult:
    """Compute the recurrence above, and its gradients if ``dO`` [H, R, T, V] and ``dS`` [H, R, K, V] are given."""
    H, T = x.q.shape[0], x.q.shape[2]
    if H > 1 and T * x.S.size > _LARGEST:
        parts = [
            token_by_token(
                Core(*(None if a is None else a[h : h + 1] for a in x)),
                scale,
                None if dO is None else partial(_of_head, dO, h),
                None if dS is None else dS[h : h + 1],
            )
            for h in range(H)
        ]
        return _join(parts)
    channels, groups = x.k.shape[-1], x.g.shape[-1]
    decays = np.where(x.g < RESET, 0.0, np.exp(np.where(x.g < RESET, 0.0, x.g)))
    decays = np.repeat(decays, channels // groups, axis=-1)  # [H, R, T, K]
    e = None if x.b is None else x.b * x.k
    written = x.v if x.w is None else x.w * x.v
    states = np.empty((T + 1, *x.S.shape), x.S.dtype)
    states[0] = x.S
    o, o_size = np.empty_like(x.v), np.empty_like(x.v)
    S_size = np.abs(x.S)
    for t in range(T):
        held = decays[:, :, t, :, None] * states[t]
        r = written[:, :, t]
        if e is not None:
            r = r - _vec(e, t, held)
        states[t + 1] = held + x.k[:, :, t, :, None] * r[..., None, :]
        o[:, :, t] = scale * _vec(x.q, t, states[t + 1])
        o_size[:, :, t] = abs(scale) * _vec(np.abs(x.q), t, np.abs(states[t + 1]))
        if t == T - 1:
            parts_r = np.abs(written[:, :, t])
            if e is not None:
                parts_r = parts_r + _vec(np.abs(e), t, np.abs(held))
            S_size = np.abs(held) + np.abs(x.k)[:, :, t, :, None] * parts_r[..., None, :]
    if dO is None or dS is None:
        return CoreResult(o, states[T], None, o_size, S_size)

    dO = output_cotangent(dO, o)
    full = np.broadcast_shapes(x.k.shape, (*x.v.shape[:-1], channels))
    d = CoreGradients(
        np.zeros(full, o.dtype),
        np.zeros(full, o.dtype),
        np.zeros_like(x.v),
        np.zeros_like(x.g),
        None if x.b is None else np.zeros(full, o.dtype),
        None if x.w is None else np.zeros_like(x.v),
        dS,
    )
    size = CoreGradients(*(None if a is None else np.zeros_like(a) for a in d))
    dS, dS_size = dS.copy(), np.abs(dS)
    for t in range(T - 1, -1, -1):
        q, k = x.q[:, :, t, :, None], x.k[:, :, t, :, None]  # [H, 1, K, 1]
        held, after, out = decays[:, :, t, :, None] * states[t], states[t + 1], dO[:, :, t, None, :]
        dS = dS + scale * q * out
        dq = scale * np.sum(after * out, -1)
        dq_size = abs(scale) * np.sum(np.abs(after * out), -1)
        r = written[:, :, t]
        if e is not None:
            r = r - _vec(e, t, held)
        r = r[..., None, :]
        dr = np.sum(dS * k, -2)
        dr_size = np.sum(np.abs(dS * k), -2)
        dk = np.sum(dS * r, -1)
        dk_size = np.sum(np.abs(dS * r), -1)
        d.q[:, :, t], size.q[:, :, t] = dq, dq_size
        gated = 1.0 if x.w is None else x.w[:, :, t]
        d.v[:, :, t], size.v[:, :, t] = dr * gated, dr_size * np.abs(gated)
        if d.w is not None:
            d.w[:, :, t], size.w[:, :, t] = dr * x.v[:, :, t], dr_size * np.abs(x.v[:, :, t])
        pieces = np.abs(x.q[:, :, t]) * dq_size + np.abs(x.k[:, :, t]) * dk_size
        dheld, dheld_size = dS, np.abs(dS)
        if e is not None:
            de = -np.sum(held * dr[..., None, :], -1)
            de_size = np.sum(np.abs(held * dr[..., None, :]), -1)
            d.b[:, :, t], size.b[:, :, t] = de * x.k[:, :, t], de_size * np.abs(x.k[:, :, t])
            dk = dk + de * x.b[:, :, t]
            dk_size = dk_size + de_size * np.abs(x.b[:, :, t])
            step = e[:, :, t, :, None] * dr[..., None, :]
            dheld, dheld_size = dheld - step, dheld_size + np.abs(step)
            pieces = pieces + np.abs(e[:, :, t]) * de_size
        d.k[:, :, t], size.k[:, :, t] = dk, dk_size
        dg = np.sum(held * dheld, -1)
        reset = x.g[:, :, t] < RESET
        d.g[:, :, t] = np.where(reset, 0.0, _groups(dg, groups))
        size.g[:, :, t] = np.where(reset, 0.0, _groups(pieces, groups))
        dS = decays[:, :, t, :, None] * dheld
        dS_size = decays[:, :, t, :, None] * dheld_size
    return CoreResult(o, states[T], _reduce(x, d._replace(S=dS)), o_size, S_size, _reduce(x, size._replace(S=dS_size)))


def _of_head(dO: OutputCotangent, h: int, o: np.ndarray, heads: slice) -> np.ndarray:
    """Return the part of ``dO`` for key head ``h`` alone."""
    return output_cotangent(dO, o, slice(h, h + 1))


def _vec(rows: np.ndarray, t: int, S: np.ndarray) -> np.ndarray:
    """Compute S^T row_t [H, R, V] from rows [H, R or 1, T, K] and S [H, R, K, V]."""
    return (rows[:, :, t, None, :] @ S)[..., 0, :]


def _groups(x: np.ndarray, groups: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], groups, -1).sum(-1)


def _reduce(x: Core, d: CoreGradients) -> CoreGradients:
    """Sum over what the forward pass broadcast: q and k over a key head's value heads, gates over their channels."""

    def like(value: np.ndarray | None, operand: np.ndarray | None) -> np.ndarray | None:
        if value is None or operand is None:
            return None
        for axis in (1, -1):
            if operand.shape[axis] == 1 and value.shape[axis] != 1:
                value = value.sum(axis, keepdims=True)
        return value

    return CoreGradients(*(like(value, operand) for value, operand in zip(d, x, strict=True)))


def _join(parts: list[CoreResult]) -> CoreResult:
    def cat(values: list[np.ndarray | None]) -> np.ndarray | None:
        return None if values[0] is None else np.concatenate(values)

    def fields(values: list[CoreGradients | None]) -> CoreGradients | None:
        return None if values[0] is None else CoreGradients(*(cat(list(v)) for v in zip(*values, strict=True)))

    return CoreResult(
        cat([p.o for p in parts]),
        cat([p.S for p in parts]),
        fields([p.gradients for p in parts]),
        cat([p.o_size for p in parts]),
        cat([p.S_size for p in parts]),
        fields([p.gradient_sizes for p in parts]),
    )
