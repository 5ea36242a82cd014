"""A whole call around the kernel: what lies before the rule, the kernel, the output's form, and the gradient's rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..spec.errors import bad
from ..spec.evaluate import DIFFERENTIABLE
from ..spec.problem import Signature
from ..spec.prologue import finish, prepare, swap_state
from .kernels import stages as own_stages
from .kernels.forward import forward
from .kernels.inside import HISTORY, tap_rows
from .kernels.pipeline import Channels
from .kernels.pipeline import forward as pipelined
from .plan import Core, Pipeline, pipeline, plan

__all__ = ["compute", "probe"]

Array = Any
Outputs = tuple[Array, Array | None, Array | None]

#: Computes the same call without the kernel: where there is no TPU, and for gradients.
Other = Callable[[Signature, dict[str, Array]], Outputs]


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def compute(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]
) -> Outputs:
    """o, states and convolution state of a call, in the caller's layout and dtypes.

    Args:
        interpret: False (for a TPU), True or ``pltpu.InterpretParams``.
        stages: the functions that the kernel is made of.
        other: differentiated for gradients; and if ``choose``, what the compiler takes for anything but a TPU.
        choose: leave it to the compiler which of both to take, where the operands are traced and not interpreted.
    """
    return _call(s, interpret, stages, other, choose, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _call(s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]) -> Outputs:
    def kernel(operands: dict[str, Array]) -> Outputs:
        return _by_kernel(s, interpret, stages, operands)[0]

    if choose and s.traced and interpret is False:  # what it will run on is the compiler's to know
        return lax.platform_dependent(operands, tpu=kernel, default=partial(other, s))
    return kernel(operands)


def _forward(s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]) -> Any:
    return _call(s, interpret, stages, other, choose, operands), operands


def _backward(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: Any, cotangents: Any
) -> Any:
    smooth = {name: a for name, a in operands.items() if name in DIFFERENTIABLE}
    _, pull = jax.vjp(lambda smooth: other(s, {**operands, **smooth}), smooth)
    return ({**dict.fromkeys(operands), **pull(cotangents)[0]},)


_call.defvjp(_forward, _backward)


def _by_kernel(
    s: Signature, interpret: Any, stages: Any, operands: dict[str, Array], probed: bool = False
) -> tuple[Outputs, dict[str, Array]]:
    line = pipeline(s, _core()) if stages is own_stages and not probed else None
    if line is not None:
        return _by_pipeline(s, line, interpret, operands), {}
    p, x = plan(s), prepare(jnp, s, operands)
    S = jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32) if x.S is None else x.S
    # What the products would round anyway is rounded before it travels; v only where it is exact.
    keys = jnp.float32 if p.q_bytes == 4 else jnp.bfloat16
    values = jnp.float32 if p.v_bytes == 4 else jnp.bfloat16
    g = jnp.repeat(x.g, p.widths.decay // x.g.shape[-1], axis=-1)  # many groups are computed channel by channel
    gates = [a for a in (g, x.b, None if p.widths.shared else x.w) if a is not None]
    bounds = operands.get("cu_seqlens")
    o, state, stage = forward(
        p,
        x.q.astype(keys),
        x.k.astype(keys),
        x.v.astype(values),
        gates,
        S,
        bounds,
        interpret=interpret,
        stages=stages,
        probe=probed,
    )
    if bounds is not None:  # boundaries that nobody could check: no chunk has been where no sequence is
        o = jnp.where((jnp.arange(s.T) < jnp.asarray(bounds)[-1])[:, None, None], o, jnp.zeros((), o.dtype))
    return (
        finish(jnp, s, operands, o),
        swap_state(jnp, s, state) if s.output_final_state else None,
        x.conv_state,
    ), stage


def _by_pipeline(s: Signature, p: Pipeline, interpret: Any, x: dict[str, Array]) -> Outputs:
    """Everything in the kernel, and outside reshapes; with a mask, the specification's prologue comes first."""
    conv_state = taps = past = gate = None
    channels = {"q": 0, "k": s.H * s.K, "v": 2 * s.H * s.K}  # where each begins in one array of them all
    flat = lambda a: jnp.reshape(a, (s.B, s.T, -1))  # noqa: E731
    if s.has("mask"):
        ready = prepare(jnp, s, x)
        given = {"q": ready.q, "k": ready.k, "v": ready.v.astype(x["v"].dtype)}
        g, b, S = ready.g[..., 0], ready.b[..., 0], ready.S
    else:
        given = {name: x[name] for name in "qkv" if name in x}
        g = jnp.zeros((s.B, s.T, s.HV), jnp.float32) if "g" not in x else jnp.reshape(x["g"], (s.B, s.T, s.HV))
        b, S = x["beta"], swap_state(jnp, s, x["initial_state"]) if s.has("initial_state") else None
    if not p.keeps_keys:
        given |= {name: given[name].astype(jnp.bfloat16) for name in "qk"}  # as the products would round them
    whole = Channels(x["qkv"], 0) if "qkv" in x else None
    q, k, v = (
        Channels(flat(given[name]), 0) if whole is None else whole._replace(first=first)
        for name, first in channels.items()
    )
    if s.conv is not None:
        width, total = s.conv.width, s.conv.channels
        rows = [jnp.reshape(x["conv_weight"], (total, width)).T, x.get("conv_bias", jnp.zeros(total))[None]]
        weight = jnp.concatenate([a.astype(jnp.float32) for a in rows]) * (0.5 if p.inside.silu else 1.0)
        weight = jnp.pad(weight, ((0, tap_rows(width) - width - 1), (0, 0)))
        before = x.get("conv_state", jnp.zeros((s.B, width - 1, total))).astype(jnp.float32)
        last = [a[:, 1 - width :].astype(jnp.float32) for a in ([x["qkv"]] if whole else map(flat, given.values()))]
        conv_state = jnp.concatenate(last, -1)
        before = jnp.pad(before, ((0, 0), (HISTORY - width + 1, 0), (0, 0)))
        taps, past = ([Channels(a, first) for first in channels.values()] for a in (weight, before))
    if p.inside.gate:
        zero = jnp.zeros(s.HV)
        gate = tuple(jnp.reshape(x.get(name, zero), (s.HV,)).astype(jnp.float32) for name in ("A_log", "dt_bias"))
    S = jnp.zeros((s.B, s.HV, s.K, s.V), jnp.float32) if S is None else S
    g, b = g.astype(jnp.float32), b.astype(jnp.float32)
    o, state = pipelined(p, q, k, v, g, b, S, taps=taps, past=past, gate=gate, dtype=s.dtype, interpret=interpret)
    return finish(jnp, s, x, o), swap_state(jnp, s, state) if s.output_final_state else None, conv_state


def _core() -> Core:
    """Of the TPU that is compiled for; a common one where nobody knows, as in an interpreter."""
    from jax.experimental.pallas import tpu as pltpu

    try:
        found = pltpu.get_tpu_info()
    except Exception:  # no TPU, or one that this jax does not know
        return Core()
    return Core(found.mxu_column_size, found.num_cores, found.vmem_capacity_bytes)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _probe(s: Signature, interpret: Any, stages: Any, operands: dict[str, Array]) -> dict[str, Array]:
    return _by_kernel(s, interpret, stages, operands, probed=True)[1]


def probe(s: Signature, interpret: Any, stages: Any, operands: dict[str, Array]) -> dict[str, tuple[Array, ...]]:
    """The kernel's stages of every chunk of a call without packed sequences, under the names of ``spec.stages.STAGES``.

    Returns:
        What ``spec.chunkwise.stage_chunk`` returns of one chunk, with [B, chunks a row, HV] before it, float32. ``wy``
        is derived, since the kernel never forms it. A row's last chunk is filled up with zeros to the chunk size.

    Raises:
        GdnError: sequences are packed.
    """
    if s.packed:
        raise bad("cu_seqlens", "given", "be None where stages are probed: chunks of packed sequences differ in length")
    found = _probe(s, interpret, stages, operands)
    x = {name: jnp.reshape(a, (s.B, -1, *a.shape[1:])) for name, a in found.items()}
    return {
        "decay": tuple(x[name][..., :: max(x[name].shape[-1] // max(s.groups, 1), 1)] for name in ("G", "count")),
        "scores": (x.get("Akk"), x["Aqk"]),
        "inverse": (x.get("T"),),
        "wy": (x["U"], x.get("W")),
        "state": (x["S"], x["after"]),
        "delta": (x["Vn"],),
        "output": (x["o"],),
    }
