"""The steps before and after the rule, for arrays of any library.

Before the rule come the convolution, the l2 norm, gates, masks, layouts and the conversion to float32; after it come
the norm and the gate of the output. Backends with automatic differentiation call ``prepare`` inside their compiled or
recorded function, so that they need no gradient of their own for it. After ``prepare`` only the bare rule remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .conv import convolve, convolve_one, final_state
from .gates import activate_gate, l2norm
from .norm import gated_norm
from .problem import Signature
from .sequences import layout, segment_starts
from .stages import Array, Namespace

__all__ = ["Prepared", "finish", "gates", "masked", "normed", "prepare", "starts", "swap_state"]


class Prepared(NamedTuple):
    """The operands of the bare rule in float32, with the axis of tokens before that of heads.

    Attributes:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: log decay [B, T, HV, n].
        b: erase gate [B, T, HV, 1 or K], or None.
        w: write gate [B, T, HV, 1 or V], or None.
        S: states [N, HV, K, V], or None for zeros.
        starts: [B, T], true where a segment begins other than the first of its row, or None.
        conv_state: [N, W - 1, channels], or None.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    b: Array | None
    w: Array | None
    S: Array | None
    starts: Array | None
    conv_state: Array | None


def finish(xp: Namespace, s: Signature, x: Mapping[str, Array], o: Array) -> Array:
    """Return the rule's output as the call returns it: normalised, gated, 0 at masked tokens, in the inputs' dtype."""
    if s.norm is not None:
        o = normed(xp, s, x, o)
    if "mask" in x:
        o = xp.where(x["mask"][..., None, None], o, xp.zeros_like(o))
    return xp.astype(o, getattr(xp, s.dtype), copy=False)


def normed(xp: Namespace, s: Signature, x: Mapping[str, Array], o: Array) -> Array:
    """Apply a mixer's output norm and gate to o [..., HV, V], whose leading axes are free, in float32."""
    assert s.norm is not None
    o = xp.astype(o, xp.float32, copy=False)
    z = xp.reshape(_real(xp, s, x, "z"), o.shape) if s.has("z") else None
    return gated_norm(xp, o, _parameter(xp, x, "norm_weight"), z, s.norm.eps, s.norm.activation)


def swap_state(xp: Namespace, s: Signature, state: Array) -> Array:
    """Convert a state from the caller's layout to [N, HV, K, V], or back: the function is its own inverse."""
    return xp.matrix_transpose(state) if s.state_layout == "vk" else state


def masked(xp: Namespace, s: Signature, x: Mapping[str, Array], name: str) -> Array:
    """Return an operand with tokens [B, T, ...] in its own dtype, with masked tokens set to 0."""
    a, mask = x[name], x.get("mask")
    a = a[:, None] if s.step else a
    if mask is None:
        return a
    keep = xp.reshape(mask, (*mask.shape, *(1,) * (a.ndim - 2)))
    return xp.where(keep, a, xp.zeros_like(a))


def _real(xp: Namespace, s: Signature, x: Mapping[str, Array], name: str) -> Array:
    """Return a real operand with tokens [B, T, ...] in float32, with masked tokens set to 0."""
    return masked(xp, s, {**x, name: xp.astype(x[name], xp.float32, copy=False)}, name)


def _parameter(xp: Namespace, x: Mapping[str, Array], name: str) -> Array | None:
    """Return an operand without tokens in float32, or None if the call does not have it."""
    return None if name not in x else xp.astype(x[name], xp.float32, copy=False)


def gates(xp: Namespace, s: Signature, x: Mapping[str, Array]) -> tuple[Array | None, Array | None, Array | None]:
    """Return g [B, T, HV, n], b [B, T, HV, 1 or K] and w [B, T, HV, 1 or V] in float32; a gate not given is None.

    If the call has beta, b and w are one array.
    """
    g = None
    if s.has("g"):
        g = xp.reshape(_real(xp, s, x, "g"), (s.B, s.T, s.HV, s.groups))
        if s.gate is not None:
            A, bias = _parameter(xp, x, "A_log"), _parameter(xp, x, "dt_bias")
            g = activate_gate(
                xp,
                g,
                None if A is None else A[:, None],
                None if bias is None else xp.reshape(bias, (s.HV, s.groups)),
                s.gate.lower_bound,
            )
            if "mask" in x:
                g = xp.where(x["mask"][..., None, None], g, xp.zeros_like(g))
    if s.has("beta"):
        b = w = _real(xp, s, x, "beta")[..., None]
    else:
        b, w = (
            None if name not in x else xp.reshape(_real(xp, s, x, name), (s.B, s.T, s.HV, -1 if s.B * s.T else 1))
            for name in ("erase", "write")
        )
    return g, b, w


def prepare(xp: Namespace, s: Signature, x: Mapping[str, Array]) -> Prepared:
    """Compute the operands of the bare rule from those of the call. T must not be 0."""
    mask = x.get("mask")
    real = lambda name: _real(xp, s, x, name)  # noqa: E731
    conv_state = None
    if s.conv is None:
        q, k, v = real("q"), real("k"), real("v")
    else:
        channels = real("qkv") if s.conv.fused else xp.concat([real("q"), real("k"), real("v")], axis=-1)
        before = _parameter(xp, x, "conv_state")
        weight = xp.reshape(_parameter(xp, x, "conv_weight"), (s.conv.channels, s.conv.width))
        bias = _parameter(xp, x, "conv_bias")
        if s.step:
            y, conv_state = convolve_one(xp, channels, weight, bias, s.conv.activation, before)
        else:
            place = layout(xp, channels, x.get("cu_seqlens"), x.get("segment_ids"), mask)
            y = convolve(xp, channels, weight, bias, s.conv.activation, place, before)
            conv_state = final_state(xp, channels, place, before, s.conv.width)
        if mask is not None:
            y = xp.where(mask[..., None], y, xp.zeros_like(y))
        keys = s.H * s.K
        q = xp.reshape(y[..., :keys], (s.B, s.T, s.H, s.K))
        k = xp.reshape(y[..., keys : 2 * keys], (s.B, s.T, s.H, s.K))
        v = xp.reshape(y[..., 2 * keys :], (s.B, s.T, s.HV, s.V))
    if s.qk_l2norm:
        q, k = l2norm(xp, q), l2norm(xp, k)
    g, b, w = gates(xp, s, x)
    g = xp.zeros_like(v[..., :1]) if g is None else g
    S = swap_state(xp, s, x["initial_state"]) if s.has("initial_state") else None
    return Prepared(q, k, v, g, b, w, S, starts(xp, s, x), conv_state)


def starts(xp: Namespace, s: Signature, x: Mapping[str, Array]) -> Array | None:
    """Return [B, T], true where a segment begins other than the first of its row, or None if there are no segments."""
    return segment_starts(xp, x["segment_ids"], x.get("mask")) if s.has("segment_ids") else None
