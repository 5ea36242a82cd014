"""What lies before the rule, for the backward pass: computed again by a kernel, and pulled back by another.

The kernels start every sequence from zeros. The few tokens of a sequence that see a given convolution state, and those
that are its final one, are the specification's, by XLA, on arrays of those tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..spec.conv import convolve
from ..spec.gates import l2norm
from ..spec.problem import Signature
from ..spec.prologue import Prepared, gates, swap_state
from ..spec.sequences import layout
from .chips import Chip
from .kernels.prologue.backward import prologue_gradients
from .kernels.prologue.channel_gates import PARAMETERS, ChannelGates, channel_gate_gradients, channel_gates
from .kernels.prologue.forward import Places, prologue, tap_rows
from .kernels.prologue.plan import Prologue, gate_block, prologue_plans

__all__ = ["Inside", "inside"]

Array = Any
Operands = dict[str, Array]


class _Tokens(NamedTuple):
    """As many tokens of each sequence, from one on: rows and columns of the arrays, [N, L], columns T where there is no
    such token; there: [N, L], where there is one; begin: [N], their first one's number in its sequence."""

    row: Array
    column: Array
    there: Array
    begin: Array


def inside(s: Signature, chip: Chip, interpret: Any, operands: Operands) -> Inside | None:
    """The prologue of a call by the kernels, or None where XLA derives it from the specification."""
    plans = prologue_plans(s, chip)
    return None if plans is None else Inside(s, chip, plans, interpret, operands)


class Inside:
    """The convolution, norm and gates of one call."""

    def __init__(self, s: Signature, chip: Chip, plans: tuple[Prologue, ...], interpret: Any, x: Operands) -> None:
        assert s.conv is not None
        self.s, self.plans, self.interpret, self.x = s, plans, interpret, x
        self.width, self.silu = s.conv.width, s.conv.activation == "silu"
        self.names = ("qkv",) if s.conv.fused else tuple("qkv")
        self.raw = [jnp.reshape(x[name], (s.B, s.T, -1)) for name in self.names]
        self.weight = jnp.reshape(x["conv_weight"], (s.conv.channels, self.width)).astype(jnp.float32)
        self.bias = x["conv_bias"].astype(jnp.float32) if s.has("conv_bias") else None
        self.past = x["conv_state"].astype(jnp.float32) if s.has("conv_state") else None
        rows = [self.weight.T, *([] if self.bias is None else [self.bias[None]])]
        taps = jnp.concatenate(rows) * (0.5 if self.silu else 1.0)
        taps = jnp.pad(taps, ((0, tap_rows(plans[0]) - len(taps)), (0, 0)))
        cuts = np.cumsum([p.channels for p in plans])[:-1].tolist()
        self.taps = jnp.split(taps, cuts, axis=1)
        self.places = [_places(p, x.get("cu_seqlens")) for p in plans]
        self.gate_plan = self.parameters = None
        block = gate_block(s, chip)
        if block is not None:
            assert s.gate is not None
            vmem = 24 * block[0] * block[1] + (6 << 20)
            self.gate_plan = ChannelGates(s.B, s.T, s.HV * s.K, *block, s.gate.lower_bound, s.packed, vmem)
            self.raw_gates = jnp.reshape(x["g"], (s.B, s.T, -1))
            rate = jnp.exp(jnp.ravel(x["A_log"]).astype(jnp.float32)) if "A_log" in x else jnp.ones(s.HV)
            bias = jnp.ravel(x["dt_bias"]).astype(jnp.float32) if "dt_bias" in x else jnp.zeros(s.HV * s.K)
            of_channels = jnp.stack([jnp.repeat(rate, s.K), bias])
            self.parameters = jnp.pad(of_channels, ((0, PARAMETERS - len(of_channels)), (0, 0)))
        mine = () if self.gate_plan is None else ("g", "A_log", "dt_bias")
        names = ("g", "beta", "erase", "write", "A_log", "dt_bias")
        self.smooth_gates = {name: x[name] for name in names if name in x and name not in mine}

    def prepared(self, names: str, keys: Any, values: Any) -> Prepared:
        """The operands of the bare rule: of q, k and v those that are named, in these dtypes, and the others None."""
        s, found = self.s, dict.fromkeys("qkv")
        for p, x, taps, places in zip(self.plans, self.raw, self.taps, self.places, strict=True):
            dtypes = {part.name: values if part.name == "v" else keys for part in p.parts if part.name in names}
            if dtypes:
                found |= prologue(p, x, taps, places, dtypes, interpret=self.interpret)
        if self.past is not None:
            tokens = self._tokens(jnp.zeros((), jnp.int32), self.width - 1)
            for name, a in zip("qkv", self._by_specification(*self._slab(tokens)), strict=True):
                if found[name] is not None:
                    found[name] = self._put(found[name], tokens, a)
        (g, b, w), self._pull_gates = jax.vjp(self._gates, self.smooth_gates)
        if self.gate_plan is not None:
            g = channel_gates(self.gate_plan, self.raw_gates, self.parameters, interpret=self.interpret)
            g = jnp.reshape(g, (s.B, s.T, s.HV, s.K))
        heads = {"q": (s.H, s.K), "k": (s.H, s.K), "v": (s.HV, s.V)}
        q, k, v = (None if a is None else jnp.reshape(a, (s.B, s.T, *heads[name])) for name, a in found.items())
        S = swap_state(jnp, s, self.x["initial_state"]) if s.has("initial_state") else None
        return Prepared(q, k, v, g, b, w, S, None, None)

    def _gates(self, some: Operands) -> tuple[Array, Array | None, Array | None]:
        s, mine = self.s, self.gate_plan is not None
        g, b, w = gates(jnp, *_without_decays(s, {**self.x, **some})) if mine else gates(jnp, s, {**self.x, **some})
        if g is None and not mine:
            g = jnp.zeros((s.B, s.T, s.HV, 1), jnp.float32)
        return g, b, w

    def pulled(self, d: Prepared) -> Operands:
        """Cotangents of the call's operands from those of ``prepared``, whose q, k and v may be of any shape that
        begins with [B, T], and d.conv_state, that of the final convolution state, or None."""
        s = self.s
        found: Operands = dict(self._pull_gates((None if self.gate_plan is not None else d.g, d.b, d.w))[0])
        if self.gate_plan is not None:
            found |= self._pulled_decays(d.g)
        if s.has("initial_state"):
            found["initial_state"] = swap_state(jnp, s, d.S)
        given = {name: jnp.reshape(a, (s.B, s.T, -1)) for name, a in zip("qkv", (d.q, d.k, d.v), strict=True)}
        dx, sums = [], []
        for p, x, taps, places in zip(self.plans, self.raw, self.taps, self.places, strict=True):
            some = [given[part.name] for part in p.parts]
            a, total = prologue_gradients(p, x, taps, places, some, interpret=self.interpret)
            dx.append(a)
            sums.append(jnp.sum(jnp.reshape(total, (p.sums, 8, -1)), 1) * (0.5 if self.silu else 1.0))
        total = jnp.concatenate(sums, -1)
        dw, db = total[: self.width].T, None if self.bias is None else total[self.width]
        d_past = None
        if self.past is not None:
            dx, others = self._first_tokens(dx, given)
            d_past, dw = others["past"], dw + others["weight"]
            db = None if db is None else db + others["bias"]
        if d.conv_state is not None and self.width > 1:
            dx, d_state = self._last_tokens(dx, given, d.conv_state)
            d_past = None if d_past is None else d_past + d_state
        for name, a in zip(self.names, dx, strict=True):
            found[name] = jnp.reshape(a, self.x[name].shape)
        parameters = {"conv_weight": dw, "conv_bias": db, "conv_state": d_past}
        for name, a in parameters.items():
            if a is not None:
                found[name] = jnp.reshape(a, self.x[name].shape).astype(self.x[name].dtype)
        return found

    def _pulled_decays(self, d: Array) -> Operands:
        """Cotangents of raw decays by channel, A_log and dt_bias; ``d`` is not read behind the last sequence."""
        s, x, bounds = self.s, self.x, self.x.get("cu_seqlens")
        assert self.gate_plan is not None
        end = (
            jnp.asarray(np.full(1, s.T, np.int32))
            if bounds is None
            else jnp.clip(bounds[-1:], 0, s.T).astype(jnp.int32)
        )
        flat = jnp.reshape(d, (s.B, s.T, -1))
        raw, sums = channel_gate_gradients(
            self.gate_plan, self.raw_gates, self.parameters, jnp.asarray(end, jnp.int32), flat, interpret=self.interpret
        )
        d_bias, d_A = jnp.sum(jnp.reshape(sums, (2, 8, -1)), 1)
        found = {"g": raw, "A_log": jnp.sum(jnp.reshape(d_A, (s.HV, s.K)), 1), "dt_bias": d_bias}
        return {name: jnp.reshape(a, x[name].shape).astype(x[name].dtype) for name, a in found.items() if name in x}

    # The tokens at the ends of sequences, by the specification.

    def _tokens(self, begin: Array, count: int) -> _Tokens:
        """``count`` tokens of each sequence from number ``begin`` [] or [N] on."""
        s, bounds = self.s, self.x.get("cu_seqlens")
        row, first, length = jnp.arange(s.N), jnp.zeros(s.N, jnp.int32), jnp.full(s.N, s.T, jnp.int32)
        if bounds is not None:
            bounds = jnp.clip(jnp.asarray(bounds).astype(jnp.int32), 0, s.T)
            row, first, length = jnp.zeros(s.N, jnp.int32), bounds[:-1], jnp.maximum(bounds[1:] - bounds[:-1], 0)
        begin = jnp.broadcast_to(begin, (s.N,))
        number = begin[:, None] + jnp.arange(count)
        there = number < length[:, None]
        column = jnp.where(there, first[:, None] + number, s.T)
        return _Tokens(jnp.broadcast_to(row[:, None], column.shape), column, there, begin)

    def _get(self, a: Array, tokens: _Tokens) -> Array:
        """[N, L, channels] float32, zeros where there is no token."""
        found = a[tokens.row, jnp.minimum(tokens.column, self.s.T - 1)].astype(jnp.float32)
        return jnp.where(tokens.there[..., None], found, 0.0)

    def _put(self, a: Array, tokens: _Tokens, values: Array) -> Array:
        values = jnp.reshape(values, (*tokens.column.shape, -1)).astype(a.dtype)
        return a.at[tokens.row, tokens.column].set(values, mode="drop")

    def _slab(self, tokens: _Tokens) -> tuple[Array, Array, Array | None, Array]:
        """Their raw channels, taps, bias, and what lies before them [N, W - 1, channels]."""
        raw = jnp.concatenate([self._get(a, tokens) for a in self.raw], -1)
        reach = self.width - 1
        number = tokens.begin[:, None] - reach + jnp.arange(reach)  # in the sequence
        column = tokens.column[:, :1] - reach + jnp.arange(reach)
        where = _Tokens(tokens.row[:, :1] + 0 * column, column, (number >= 0) & tokens.there[:, :1], tokens.begin)
        before = jnp.concatenate([self._get(a, where._replace(column=jnp.maximum(column, 0))) for a in self.raw], -1)
        if self.past is not None:
            slot = jnp.clip(number + reach, 0, reach - 1)
            given = jnp.take_along_axis(self.past, slot[..., None], axis=1)
            before = jnp.where((number < 0)[..., None], given, before)
        return raw, self.weight, self.bias, before

    def _by_specification(self, x: Array, weight: Array, bias: Array | None, before: Array) -> tuple[Array, ...]:
        """q, k and v of tokens [N, L, channels], heads side by side."""
        s = self.s
        y = convolve(jnp, x, weight, bias, "silu" if self.silu else None, layout(jnp, x, None, None, None), before)
        keys = s.H * s.K
        q, k, v = jnp.split(y, [keys, 2 * keys], axis=-1)
        if s.qk_l2norm:
            q, k = (jnp.reshape(l2norm(jnp, jnp.reshape(a, (*a.shape[:2], s.H, s.K))), a.shape) for a in (q, k))
        return q, k, v

    def _parts(self, dx: Array) -> list[Array]:
        """Channels [..] of all arrays, by array."""
        return jnp.split(dx, np.cumsum([p.channels for p in self.plans])[:-1].tolist(), axis=-1)

    def _first_tokens(self, dx: list[Array], given: Mapping[str, Array]) -> tuple[list[Array], Operands]:
        """With the cotangents of those that see the given state, and what they add to weight, bias and past."""
        reach = self.width - 1
        tokens = self._tokens(jnp.zeros((), jnp.int32), 2 * reach)  # they hand theirs on to no more
        pull = jax.vjp(self._by_specification, *self._slab(tokens))[1]
        d = tuple(self._get(given[name], tokens) for name in "qkv")
        row, column, there = (a[:, :reach] for a in tokens[:3])
        first = _Tokens(row, column, there, tokens.begin)
        whole = self._parts(pull(d)[0][:, :reach])
        own = jnp.arange(2 * reach)[:, None] < reach
        _, weight, bias, past = pull(tuple(jnp.where(own, a, 0.0) for a in d))
        dx = [self._put(a, first, b) for a, b in zip(dx, whole, strict=True)]
        return dx, {"weight": weight, "bias": bias, "past": past}

    def _last_tokens(self, dx: list[Array], given: Mapping[str, Array], d: Array) -> tuple[list[Array], Array]:
        """With the cotangents of those that are the final state's, and that of the given state where a sequence is so
        short that some of it remains."""
        reach, d = self.width - 1, d.astype(jnp.float32)
        length = jnp.sum(self._tokens(jnp.zeros((), jnp.int32), reach).there, 1)  # at most reach
        tokens = self._tokens(self._lengths() - length, reach)
        pull = jax.vjp(lambda x, *rest: self._by_specification(x, *rest), *self._slab(tokens))[1]
        whole = pull(tuple(self._get(given[name], tokens) for name in "qkv"))[0]
        index = jnp.arange(reach) + (reach - length)[:, None]
        whole = whole + jnp.take_along_axis(d, jnp.minimum(index, reach - 1)[..., None], axis=1)
        dx = [self._put(a, tokens, b) for a, b in zip(dx, self._parts(whole), strict=True)]
        index = jnp.arange(reach) - length[:, None]
        left = jnp.take_along_axis(d, jnp.maximum(index, 0)[..., None], axis=1)
        return dx, jnp.where((index >= 0)[..., None], left, 0.0)

    def _lengths(self) -> Array:
        s, bounds = self.s, self.x.get("cu_seqlens")
        if bounds is None:
            return jnp.full(s.N, s.T, jnp.int32)
        bounds = jnp.clip(jnp.asarray(bounds).astype(jnp.int32), 0, s.T)
        return jnp.maximum(bounds[1:] - bounds[:-1], 0)


def _without_decays(s: Signature, x: Mapping[str, Array]) -> tuple[Signature, dict[str, Array]]:
    """A call's other gates alone."""
    return replace(s, operands=tuple(name for name in s.operands if name != "g")), {
        name: a for name, a in x.items() if name != "g"
    }


def _places(p: Prologue, cu_seqlens: Array | None) -> Places:
    reach, token = p.taps - 1, jnp.arange(p.T)
    if not p.masks:
        return Places(jnp.zeros((p.R, 128), jnp.bfloat16), jnp.zeros(p.blocks, jnp.int32))
    if cu_seqlens is None:  # behind a row's last token there is nothing anyway
        code = jnp.minimum(token, reach) + 8 * reach
        special: Array = np.zeros(p.blocks, np.int32)
        special[0], special[-1] = p.skip or p.blocks == 1, p.T % p.R != 0
        if p.blocks == 1:
            special[0] = 1
    else:
        bounds = jnp.clip(jnp.asarray(cu_seqlens).astype(jnp.int32), 0, p.T)
        last = bounds.shape[0] - 2
        number = jnp.clip(jnp.searchsorted(bounds, token, side="right") - 1, 0, last)
        start, stop = bounds[number], bounds[number + 1]
        there = (token >= start) & (token < stop)
        code = jnp.minimum(token - start, reach) + 8 * jnp.minimum(stop - 1 - token, reach)
        code = jnp.where(there, code, -1)
        odd = jnp.pad(code != 9 * reach, (0, p.blocks * p.R - p.T), constant_values=True)
        special = jnp.any(jnp.reshape(odd, (p.blocks, p.R)), 1).astype(jnp.int32)
    return Places(jnp.broadcast_to(code[:, None], (p.T, 128)).astype(jnp.bfloat16), jnp.asarray(special))
