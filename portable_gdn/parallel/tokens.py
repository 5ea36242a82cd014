"""Context parallelism: compute a device's piece of the tokens, inside ``shard_map``.

Each device computes the map by which its piece changes any state (``maps.py``). These maps are folded over the devices
(``folds.py``), which gives the state that enters each piece. Each device then computes its own tokens from that state,
as a single device would. The convolution's last inputs come from the device before. JAX derives the gradient, which
makes the same exchanges in reverse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..door import normalise
from ..spec.errors import bad
from ..spec.jax_tracing import varying_like
from ..spec.problem import ConvKind, Options, Result, Signature
from ..spec.prologue import normed, prepare, swap_state
from ..spec.transition import Transition
from .folds import entering_states
from .maps import Piece, map_of

__all__ = ["run_piece", "tokens_each"]

Array = Any
Operands = dict[str, Array]


class _Place(NamedTuple):
    """The position of this device's piece: its tokens are ``start`` to ``start + size`` of ``total``."""

    axes: tuple[str, ...]
    start: Array
    size: int
    total: int


def tokens_each(s: Signature, parts: int) -> int:
    """Return the number of tokens per device; the last devices may have padding among theirs.

    Raises:
        GdnError: The call's tokens cannot be split over this number of devices.
    """
    if not isinstance(s.T, int):
        raise bad("sharding.sequence", "given", f"be None while T = {s.T} is a symbol")
    if parts > s.T:
        raise bad("T", s.T, f"be at least the {parts} devices over which sharding.sequence splits it")
    each = -(-s.T // parts)
    if s.conv is not None:
        if each < s.conv.width - 1:
            raise bad("T", s.T, f"give each of the {parts} devices at least the W - 1 = {s.conv.width - 1} tokens that "
                                "the convolution looks back")  # fmt: skip
        for name in ("mask", "segment_ids"):
            if s.has(name):
                raise bad(name, "given", "be left out where sharding.sequence splits a mixer's tokens")
    if s.has("mask") and s.has("segment_ids"):
        raise bad("mask", "given with segment_ids", "be left out where sharding.sequence splits the tokens")
    return each


def run_piece(
    s: Signature, options: Options, backend: str | None, x: Operands, axes: tuple[str, ...], total: int
) -> Result:
    """Return this device's outputs, and the final states of the whole sequences, which are the same on every device.

    Args:
        s: The signature of the call with this device's rows and heads, and the tokens of its piece as T.
        options: The options of that call.
        backend: The name of a backend, or None.
        x: Its operands; those with tokens hold the piece, padded with zeros after the last token.
        axes: The axes of the mesh that split the tokens.
        total: The number of tokens of the whole call.
    """
    place = _Place(axes, lax.axis_index(axes) * s.T, s.T, total)
    bounds = x.get("cu_seqlens")
    bounds = None if bounds is None else jnp.asarray(bounds).astype(jnp.int32)
    given = x.get("initial_state")
    zeros = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), x["g"] if "g" in x else x["q"])
    first = zeros if given is None else swap_state(jnp, s, given)
    conv_state, whole = None, x
    if s.conv is not None:
        before = _before(s, place, x, bounds)
        conv_state = _last_inputs(s, place, x, bounds)
        x, options = _prepared(s, options, place, x, bounds, before)
    else:
        x = {name: a for name, a in x.items() if name not in ("cu_seqlens", "initial_state")}
        if place.total % s.T and bounds is None:
            x["mask"] = _inside(place, s.B) & x["mask"] if "mask" in x else _inside(place, s.B)
    enters = None
    if bounds is not None:
        x["cu_seqlens"] = jnp.clip(bounds - place.start, 0, s.T)
        enters = (bounds[:-1] < place.start) & (bounds[1:] > place.start)
        begins = (bounds[:-1] >= place.start)[:, None, None, None]
        first = jnp.where(begins, first, 0)
    own = jnp.where(enters[:, None, None, None], 0, first) if enters is not None else jnp.zeros_like(first)
    options = options._replace(output_final_state=True, state_layout="kv", precision=s.precision)
    piece = Piece(s.T, s.K, s.V, options, backend, bounds is not None, s.has("g"))
    t = map_of(piece, x, own, enters, None if bounds is None else bounds[:-1] - place.start)
    # A row's first segment here may be another one than the last of the device before: then nothing comes in.
    goes_on = _goes_on(place, x["segment_ids"]) if s.has("segment_ids") else True
    if bounds is None:
        t = t._replace(A=jnp.where(goes_on, t.A, 0))
        entered = jnp.where(goes_on, entering_states(t, first, axes), 0)
    else:
        entered = _entering_packed(place, bounds, t, first)
    x["initial_state"] = entered if enters is None else jnp.where(enters[:, None, None, None], entered, own)
    result = _run(x, options, backend)
    o, final = result.o, _final(place, bounds, first, result.state)
    state = swap_state(jnp, s, final) if s.output_final_state else None
    if s.norm is not None:
        o = normed(jnp, s, whole, o)
    return Result(o.astype(s.dtype), state, conv_state)


def _run(x: Operands, options: Options, backend: str | None) -> Result:
    problem, chosen = normalise(x, options, backend)
    return chosen.run(problem)


def _inside(place: _Place, rows: int) -> Array:
    """Return a mask [rows, size] of the tokens of the piece that are not padding."""
    there = place.start + jnp.arange(place.size) < place.total
    return jnp.broadcast_to(there, (rows, place.size))


def _goes_on(place: _Place, ids: Array) -> Array:
    """Return whether the previous device's last segment continues here [B, 1, 1, 1]; an initial state always does."""
    left = lax.ppermute(ids[:, -1], place.axes, [(j, j + 1) for j in range(lax.axis_size(place.axes) - 1)])
    return ((ids[:, 0] == left) | (place.start == 0))[:, None, None, None]


def _entering_packed(place: _Place, bounds: Array, t: Transition, first: Array) -> Array:
    """Return the state [1, HV, K, V] of the sequence that continues into the piece, if there is one."""
    end = place.start + place.size
    leaves = ((bounds[:-1] < end) & (bounds[1:] > end))[:, None, None, None]
    through = Transition(*(jnp.sum(jnp.where(leaves, a, 0), 0, keepdims=True) for a in t))
    return entering_states(through, varying_like(jnp.zeros_like(first[:1]), first), place.axes)


def _final(place: _Place, bounds: Array | None, first: Array, here: Array | None) -> Array:
    """Return the final states of whole rows or sequences [N, HV, K, V] from the states that leave the pieces."""
    assert here is not None
    end = place.start + place.size
    if bounds is None:
        return lax.psum(jnp.where(end == place.size * lax.axis_size(place.axes), here, 0), place.axes)
    empty = bounds[:-1] == bounds[1:]
    ends = (bounds[1:] > place.start) & (bounds[1:] <= end) & ~empty
    ends = ends | (empty & (place.start == 0))
    here = jnp.where(empty[:, None, None, None], first, here)
    return lax.psum(jnp.where(ends[:, None, None, None], here, 0), place.axes)


def _conv(s: Signature) -> ConvKind:
    """Return the convolution of a mixer's call."""
    assert s.conv is not None
    return s.conv


def _inputs(s: Signature, x: Operands) -> Array:
    """Return q | k | v of the piece in float32 [B, size, channels]."""
    a = x["qkv"] if _conv(s).fused else jnp.concatenate([x[name] for name in "qkv"], axis=-1)
    return a.astype(jnp.float32)


def _given(s: Signature, x: Operands) -> Array:
    if "conv_state" in x:
        return x["conv_state"].astype(jnp.float32)
    return jnp.zeros((s.N, _conv(s).width - 1, _conv(s).channels), jnp.float32)


def _sequences(s: Signature, place: _Place, bounds: Array | None) -> tuple[Array, Array]:
    """Return the first token and the end of each sequence [N]; a row is one sequence of all its tokens."""
    if bounds is None:
        return jnp.zeros(s.N, jnp.int32), jnp.full(s.N, place.total, jnp.int32)
    return bounds[:-1], bounds[1:]


def _before(s: Signature, place: _Place, x: Operands, bounds: Array | None) -> Array:
    """Return the convolution's inputs before the piece, or before sequences that begin in it [N, W - 1, channels]."""
    a, back = _inputs(s, x), _conv(s).width - 1
    tail = a[:, place.size - back :]
    halo = lax.ppermute(tail, place.axes, [(j, j + 1) for j in range(lax.axis_size(place.axes) - 1)])
    halo = jnp.broadcast_to(halo, (s.N, *halo.shape[1:]))
    begin, end = _sequences(s, place, bounds)
    at = place.start - back + jnp.arange(back)  # the token of each row of the halo
    given = varying_like(_given(s, x), halo)
    slot = jnp.clip(back + at[None] - begin[:, None], 0, max(back - 1, 0))
    older = jnp.take_along_axis(given, slot[..., None], axis=1) if back else given
    inside = (at[None] >= begin[:, None])[..., None]
    enters = ((begin < place.start) & (end > place.start))[:, None, None]
    return jnp.where(enters, jnp.where(inside, halo, older), given)


def _last_inputs(s: Signature, place: _Place, x: Operands, bounds: Array | None) -> Array:
    """Return the last W - 1 inputs of every sequence, which are the same on every device [N, W - 1, channels]."""
    a, back = _inputs(s, x), _conv(s).width - 1
    given = varying_like(_given(s, x), a)
    begin, end = _sequences(s, place, bounds)
    at = end[:, None] - back + jnp.arange(back)[None]  # [N, W - 1]
    local = at - place.start
    here = (at >= begin[:, None]) & (local >= 0) & (local < place.size)
    rows = jnp.zeros((s.N, 1), jnp.int32) if bounds is not None else jnp.arange(s.N)[:, None]
    taken = jnp.where(here[..., None], a[rows, jnp.clip(local, 0, place.size - 1)], 0)
    slot = jnp.clip(back + at - begin[:, None], 0, max(back - 1, 0))
    older = jnp.take_along_axis(given, slot[..., None], axis=1) if back else given
    old = ((at < begin[:, None]) & (place.start == 0))[..., None]
    return lax.psum(jnp.where(old, older, taken), place.axes)


def _prepared(
    s: Signature, options: Options, place: _Place, x: Operands, bounds: Array | None, before: Array
) -> tuple[Operands, Options]:
    """Reduce a mixer's call to one of the rule: apply the convolution, the l2 norm and the gates."""
    x = {name: a for name, a in x.items() if name not in ("conv_state", "initial_state")}
    if bounds is not None:
        x["cu_seqlens"] = jnp.clip(bounds - place.start, 0, s.T)
    x["conv_state"] = before
    p = prepare(jnp, replace(s, operands=tuple(x)), x)
    found = {"q": p.q, "k": p.k, "v": p.v, "g": p.g}
    if s.has("beta"):
        assert p.b is not None
        found["beta"] = p.b[..., 0]
    else:
        found |= {name: a for name, a in (("erase", p.b), ("write", p.w)) if a is not None}
        for name in ("erase", "write"):
            if name in found and found[name].shape[-1] == 1:
                found[name] = found[name][..., 0]
    if place.total % s.T:
        there = _inside(place, s.B)
        found = {n: jnp.where(jnp.reshape(there, (*there.shape, *[1] * (a.ndim - 2))), a, 0) for n, a in found.items()}
    if bounds is not None:
        found["cu_seqlens"] = x["cu_seqlens"]
    return found, Options(s.scale, chunk_size=options.chunk_size, deterministic=options.deterministic)
