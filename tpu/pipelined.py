"""Compute a call by the pipelined kernel: prepare its operands, and gather the convolution's state by XLA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..spec.conv import final_state
from ..spec.jax_tracing import varying_like
from ..spec.problem import Signature
from ..spec.prologue import finish, prepare, swap_state
from ..spec.sequences import layout
from .execution import Outputs
from .kernels.pipelined.blocks import Channels, Epilogue, GateOperands, Prologue, TokenOperands
from .kernels.pipelined.forward import forward
from .kernels.pipelined.geometry import Pipeline
from .kernels.pipelined.plan import prepared_outside
from .kernels.pipelined.prologue import HISTORY, tap_rows
from .segments import marked, separated

__all__ = ["by_pipeline"]

Array = Any


def by_pipeline(s: Signature, p: Pipeline, interpret: Any, x: dict[str, Array]) -> tuple[Outputs, dict[str, Array]]:
    """Return the outputs, and what the plan saves for each chunk.

    Saved arrays hold the chunks of all rows, [chunks, HV, ...], in the order of the tables, unless they hold whole grid
    steps. The kernel computes everything and only reshapes are outside; with a mask or segments, the specification's
    prologue comes first.
    """
    conv_state = prologue = reached = None
    channels = {"q": 0, "k": s.H * s.K, "v": 2 * s.H * s.K}  # where each begins in one array of them all
    flat = lambda a: jnp.reshape(a, (s.B, s.T, -1))  # noqa: E731
    outside = prepared_outside(s)
    if outside:
        ready, reached = separated(prepare(jnp, s, x))
        given = {"q": ready.q, "k": ready.k, "v": ready.v if s.conv is not None else ready.v.astype(s.dtype)}
        g, b, w, S, conv_state = ready.g, ready.b, ready.w, ready.S, ready.conv_state
    else:
        given = {name: x[name] for name in "qkv" if name in x}
        g = x["g"] if "g" in x else jnp.zeros((s.B, s.T, s.HV), jnp.float32)
        b, w = x.get("beta", x.get("erase")), x.get("write")
        S = swap_state(jnp, s, x["initial_state"]) if s.has("initial_state") else None
    if not p.changes_keys:
        keys = {2: jnp.bfloat16, 4: jnp.float32}[p.k_bytes]  # as the products would round them
        given |= {name: given[name].astype(keys) for name in "qk"}
    whole = Channels(x["qkv"], 0) if "qkv" in x and not outside else None
    tokens = TokenOperands(
        *(
            Channels(flat(given[name]), 0) if whole is None else whole._replace(first=first)
            for name, first in channels.items()
        )
    )
    if p.inside.width:
        assert s.conv is not None
        width, total = s.conv.width, s.conv.channels
        rows = [jnp.reshape(x["conv_weight"], (total, width)).T, x.get("conv_bias", jnp.zeros(total))[None]]
        weight = jnp.concatenate([a.astype(jnp.float32) for a in rows]) * (0.5 if p.inside.silu else 1.0)
        weight = jnp.pad(weight, ((0, tap_rows(width) - width - 1), (0, 0)))
        before = x.get("conv_state", jnp.zeros((s.N, width - 1, total))).astype(jnp.float32)
        place, conv_state, first = layout(jnp, g, x.get("cu_seqlens"), None, None), [], 0
        for a in [x["qkv"]] if whole else [flat(a) for a in given.values()]:
            of = before[..., first : first + a.shape[-1]]
            conv_state.append(final_state(jnp, a, place, of, width))
            first += a.shape[-1]
        conv_state = jnp.concatenate(conv_state, -1)
        before = jnp.pad(before, ((0, 0), (HISTORY - width + 1, 0), (0, 0)))
        taps, past = (
            (Channels(a, channels["q"]), Channels(a, channels["k"]), Channels(a, channels["v"]))
            for a in (weight, before)
        )
        prologue = Prologue(taps, past)
    gates = _gate_operands(s, p, g, b, w, x)
    if S is None and (p.starts or not p.packed):
        S = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), tokens.v.array)
    bounds = x.get("cu_seqlens")
    epilogue = None
    if p.norm is not None:
        weight = x.get("norm_weight", jnp.ones(s.V))
        epilogue = Epilogue(weight.astype(jnp.float32), _gate_of_output(flat, x))
        s = replace(s, norm=None)
    wide = s.dtype if s.precision != "highest" else jnp.float32
    dtypes = s.dtype, wide
    around = prologue, epilogue
    o, state, kept = forward(p, tokens, gates, S, bounds, around=around, dtypes=dtypes, interpret=interpret)
    o, state = marked(o, state, reached)
    if not p.whole_steps:
        by_chunk = lambda name, a: a if name == "o" else jnp.reshape(a, (-1, *a.shape[2:]))  # noqa: E731
        kept = {name: by_chunk(name, a) for name, a in kept.items()}
    return (finish(jnp, s, x, o), swap_state(jnp, s, state) if s.output_final_state else None, conv_state), kept


def _gate_of_output(flat: Callable[[Array], Array], x: dict[str, Array]) -> Array | None:
    """Return z [B, T, HV V] in a dtype that a TPU can load."""
    if "z" not in x:
        return None
    z = flat(x["z"])
    return z.astype(jnp.float32) if z.dtype in (jnp.float16, jnp.float64) else z


def _gate_operands(
    s: Signature, p: Pipeline, g: Array, b: Array | None, w: Array | None, x: dict[str, Array]
) -> GateOperands:
    """Return the gates in the form that the pipeline takes, with decays repeated if the call has fewer."""
    HV = s.HV
    row = lambda a: jnp.reshape(a, (s.B, s.T, -1))  # noqa: E731
    A_log, dt_bias = (jnp.ravel(x.get(name, jnp.zeros(HV))).astype(jnp.float32) for name in ("A_log", "dt_bias"))

    def widened(a: Array) -> Array:
        """Repeat decays [.., HV n] to the number that the kernel has."""
        return jnp.repeat(a, HV * p.widths.decay // a.shape[-1], axis=-1)

    parameters = None
    if p.inside.gate:
        parameters = jnp.stack([widened(jnp.exp(A_log) if p.by_channel else A_log), widened(dt_bias)])
    g, b = widened(row(g)), None if b is None else row(b)
    if not p.by_channel:
        g = g.astype(jnp.float32)
    if b is not None and p.widths.erase == 1:
        b = b.astype(jnp.float32)
    return GateOperands(g, b, row(w) if p.widths.write > 1 else None, parameters)
