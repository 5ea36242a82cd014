"""What lies before the rule, for arrays of any library: convolution, l2 norm, gates, masks, layouts, float32.

Backends with automatic derivatives call ``prepare`` inside their compiled or recorded function, so that its gradient
comes by itself; what remains behind it is the bare rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .conv import convolve, final_state
from .gates import activate_gate, l2norm
from .problem import Signature
from .sequences import layout, segment_starts
from .stages import Array, Namespace

__all__ = ["Prepared", "finish", "prepare", "swap_state"]


class Prepared(NamedTuple):
    """Float32 operands of the bare rule, tokens before heads.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, n]; b [B, T, HV, 1 or K] or None; w [B, T, HV, 1 or V] or None;
    S [N, HV, K, V] or None (zeros); starts [B, T] where a segment other than the first begins, or None;
    conv_state [N, W - 1, channels] or None.
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
    """The rule's float32 output as the call returns it: 0 at masked tokens, in the dtype of the inputs."""
    if "mask" in x:
        o = xp.where(x["mask"][..., None, None], o, xp.zeros_like(o))
    return xp.astype(o, getattr(xp, s.dtype), copy=False)


def swap_state(xp: Namespace, s: Signature, state: Array) -> Array:
    """A state between the caller's layout and [N, HV, K, V]; its own inverse."""
    return xp.matrix_transpose(state) if s.state_layout == "vk" else state


def prepare(xp: Namespace, s: Signature, x: Mapping[str, Array]) -> Prepared:
    """Operands of the bare rule from those of the call. T must not be 0."""
    mask = x.get("mask")

    def real(name: str) -> Array:
        """An operand with tokens, in float32, masked tokens 0 whatever they held."""
        a = xp.astype(x[name], xp.float32, copy=False)
        a = a[:, None] if s.step else a
        if mask is None:
            return a
        keep = xp.reshape(mask, (*mask.shape, *(1,) * (a.ndim - 2)))
        return xp.where(keep, a, xp.zeros_like(a))

    parameter = lambda name: None if name not in x else xp.astype(x[name], xp.float32, copy=False)  # noqa: E731
    conv_state = None
    if s.conv is None:
        q, k, v = real("q"), real("k"), real("v")
    else:
        channels = real("qkv") if s.conv.fused else xp.concat([real("q"), real("k"), real("v")], axis=-1)
        place = layout(xp, channels, x.get("cu_seqlens"), x.get("segment_ids"), mask)
        before = parameter("conv_state")
        weight = xp.reshape(parameter("conv_weight"), (s.conv.channels, s.conv.width))
        y = convolve(xp, channels, weight, parameter("conv_bias"), s.conv.activation, place, before)
        conv_state = final_state(xp, channels, place, before, s.conv.width)
        if mask is not None:
            y = xp.where(mask[..., None], y, xp.zeros_like(y))
        keys = s.H * s.K
        q = xp.reshape(y[..., :keys], (s.B, s.T, s.H, s.K))
        k = xp.reshape(y[..., keys : 2 * keys], (s.B, s.T, s.H, s.K))
        v = xp.reshape(y[..., 2 * keys :], (s.B, s.T, s.HV, s.V))
    if s.qk_l2norm:
        q, k = l2norm(xp, q), l2norm(xp, k)

    if s.has("g"):
        g = xp.reshape(real("g"), (s.B, s.T, s.HV, s.groups))
        if s.gate is not None:
            A, bias = parameter("A_log"), parameter("dt_bias")
            g = activate_gate(
                xp,
                g,
                None if A is None else A[:, None],
                None if bias is None else xp.reshape(bias, (s.HV, s.groups)),
                s.gate.lower_bound,
            )
            if mask is not None:
                g = xp.where(mask[..., None, None], g, xp.zeros_like(g))
    else:
        g = xp.zeros_like(v[..., :1])
    if s.has("beta"):
        b = w = real("beta")[..., None]
    else:
        b, w = (
            None if name not in x else xp.reshape(real(name), (s.B, s.T, s.HV, -1 if s.B * s.T else 1))
            for name in ("erase", "write")
        )
    starts = segment_starts(xp, x["segment_ids"], mask) if s.has("segment_ids") else None
    S = swap_state(xp, s, x["initial_state"]) if s.has("initial_state") else None
    return Prepared(q, k, v, g, b, w, S, starts, conv_state)
