"""A whole call around the kernels: the prologue, the kernel, the layout of the output, and the rule of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..spec import jax_arrays
from ..spec import jax_isolation as isolation
from ..spec.errors import GdnError
from ..spec.jax_tracing import axes_of, own_settings, varying, varying_like
from ..spec.operands import DIFFERENTIABLE
from ..spec.pieces import run_by_pieces
from ..spec.problem import Problem, Result, Signature
from ..spec.prologue import Prepared, finish, prepare, swap_state
from .epilogue import as_given, norm_operands, through_norm
from .execution import Execution, Outputs
from .kernels.common.gate_widths import widths
from .kernels.common.gradients import Cotangents, Kept, RuleGradients
from .kernels.common.tiles import CHUNK
from .kernels.pipelined.backward import ReverseOperands, reverse
from .kernels.pipelined.backward_plan import Reverse
from .kernels.pipelined.geometry import Pipeline
from .kernels.plain.backward import backward
from .kernels.plain.blocks import Making, PlainOperands
from .kernels.plain.forward import forward
from .kernels.plain.plan import Plan
from .lowering import kernel_or_else
from .pipelined import by_pipeline
from .prologue import inside
from .segments import marked, separated, where_sequences_are

__all__ = ["KEPT", "by_plain_kernel", "compute", "compute_gradients", "compute_with_states"]

Array = Any
Operands = dict[str, Array]

#: The name of what the forward pass keeps for the backward pass, for policies of ``jax.checkpoint``.
KEPT = "gated_delta_rule_kept"


@partial(jax.jit, static_argnums=0)
@own_settings
def compute(e: Execution, operands: Operands) -> Outputs:
    """Return o, the states and the convolution state of a call, in the caller's layout and dtypes."""
    return _call(e, _varying(e, operands))


@partial(jax.jit, static_argnums=(0, 1))
@own_settings
def compute_with_states(e: Execution, every: int, operands: Operands) -> tuple[Outputs, Array]:
    """Return what ``compute`` returns, and the states after every ``every`` tokens [B, T // every, ...] of each row."""
    operands = _varying(e, operands)
    if e.with_states is None or every % CHUNK:
        run = lambda problem: Result(*_call(e.of(problem.signature), problem.operands))  # noqa: E731
        result, states = run_by_pieces(run, Problem(e.signature, operands), every)
        return tuple(result), states
    return _with_states_every(e, every, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@own_settings
def _with_states_every(e: Execution, every: int, operands: Operands) -> tuple[Outputs, Array]:
    s = e.signature

    def kernel(operands: Operands) -> tuple[Outputs, Array]:
        line = e.with_states
        assert line is not None
        (o, state, conv_state), kept = by_pipeline(replace(s, output_final_state=True), line, e.interpret, operands)
        assert state is not None
        before = swap_state(jnp, s, jnp.reshape(kept["S"], (s.B, line.blocks, *kept["S"].shape[1:])))
        chunks = every // CHUNK  # those after a chunk are those before the next one, or the last
        found = jnp.concatenate([before, state[:, None]], 1)[:, chunks : s.T // CHUNK + 1 : chunks]
        return (o, state if s.output_final_state else None, conv_state), found

    return _chosen(e, kernel, partial(_other_by_pieces, e, every), operands)


def _other_by_pieces(e: Execution, every: int, operands: Operands) -> tuple[Outputs, Array]:
    run = lambda problem: Result(*e.other(problem.signature, problem.operands))  # noqa: E731
    result, states = run_by_pieces(run, Problem(e.signature, operands), every)
    return tuple(result), states


@own_settings
def _with_states_every_backward(e: Execution, every: int, operands: Operands, cotangents: Any) -> Any:
    outputs = lambda smooth: _other_by_pieces(e, every, {**operands, **smooth})  # noqa: E731
    return ({**dict.fromkeys(operands), **jax.vjp(outputs, _smooth(operands))[1](cotangents)[0]},)


_with_states_every.defvjp(lambda *args: (_with_states_every(*args), args[-1]), _with_states_every_backward)


@partial(jax.jit, static_argnums=0)
@own_settings
def compute_gradients(e: Execution, operands: Operands, cotangents: Operands) -> tuple[Outputs, Operands]:
    """Return what ``compute`` returns, and the cotangents of the float operands from those of "o" and "state"."""
    run = lambda problem: Result(*_call(e, problem.operands))  # noqa: E731
    result, found = jax_arrays.gradients(run, Problem(e.signature, operands), cotangents)
    return tuple(result), found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@own_settings
def _call(e: Execution, operands: Operands) -> Outputs:
    return _chosen(e, partial(_by_kernel, e), partial(e.other, e.signature), operands)


@own_settings
def _forward(e: Execution, operands: Operands) -> Any:
    """Compute the call, and the residuals that the backward pass needs in addition to the operands."""
    if e.training is None:
        return _call(e, operands), (operands, None)
    out, kept = _call_with_kept(e, operands)
    return out, (operands, {name: checkpoint_name(a, KEPT) for name, a in kept.items()})


@own_settings
def _backward(e: Execution, saved: Any, cotangents: Any) -> Any:
    operands, kept = saved
    found = _pull_other(e, operands, cotangents) if kept is None else _pull(e, operands, kept, cotangents)
    return ({**dict.fromkeys(operands), **found},)


_call.defvjp(_forward, _backward)


# Both halves of the gradient have gradients too: second derivatives are those of the other backend.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@own_settings
def _call_with_kept(e: Execution, operands: Operands) -> tuple[Outputs, Operands]:
    """Compute the call, and what its chunks save for the backward pass."""
    assert e.training is not None
    p = e.training.forward

    def kernel(operands: Operands) -> tuple[Outputs, Operands]:
        out, kept = _before_norm(e, p, operands, ("S",))
        if e.signature.norm is None or _norms(p):
            return out, kept
        o, *states = out
        return (finish(jnp, e.signature, operands, o), *states), {**kept, "o": o}

    def elsewhere(operands: Operands) -> tuple[Outputs, Operands]:
        kept = jax.eval_shape(kernel, operands)[1]  # zeros, which nobody reads
        zeros = {name: jnp.zeros(a.shape, a.dtype) for name, a in kept.items()}
        return e.other(e.signature, operands), varying_like(zeros, *operands.values())

    return _chosen(e, kernel, elsewhere, operands)


@own_settings
def _call_with_kept_backward(e: Execution, operands: Operands, cotangents: Any) -> Any:
    return ({**dict.fromkeys(operands), **_pull_other(e, operands, cotangents[0])},)


_call_with_kept.defvjp(lambda *args: (_call_with_kept(*args), args[-1]), _call_with_kept_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@own_settings
def _pull(e: Execution, operands: Operands, kept: Operands, cotangents: Outputs) -> Operands:
    """Return the cotangents of the float operands."""

    def elsewhere(operands: Operands, kept: Operands, cotangents: Outputs) -> Operands:
        return _pull_other(e, operands, cotangents)

    return _chosen(e, partial(_by_backward_kernel, e), elsewhere, operands, kept, cotangents)


@own_settings
def _pull_backward(e: Execution, saved: Any, second: Any) -> Any:
    operands, cotangents = saved
    smooth = _smooth(operands)
    pull = lambda smooth, cotangents: _pull_other(e, {**operands, **smooth}, cotangents)  # noqa: E731
    d_smooth, d_cotangents = jax.vjp(pull, smooth, cotangents)[1](second)
    return {**dict.fromkeys(operands), **d_smooth}, None, d_cotangents


_pull.defvjp(lambda *args: (_pull(*args), (args[-3], args[-1])), _pull_backward)


def _varying(e: Execution, operands: Operands) -> Operands:
    """Make all operands vary over the same axes of the mesh, as ``jax.shard_map`` requires.

    Raises:
        GdnError: Pallas' interpreters do not work where ``shard_map`` tracks these axes.
    """
    if e.interpret is not False and axes_of(*operands.values()):
        raise GdnError(
            "backend 'pallas-interpret' is called inside jax.shard_map with check_vma=True, which Pallas' interpreter "
            "cannot take; give shard_map check_vma=False, or take backend 'xla' or 'pallas'."
        )
    return varying(operands)


def _smooth(operands: Operands) -> Operands:
    return {name: a for name, a in operands.items() if name in DIFFERENTIABLE}


def _pull_other(e: Execution, operands: Operands, cotangents: Outputs) -> Operands:
    return jax.vjp(lambda smooth: e.other(e.signature, {**operands, **smooth}), _smooth(operands))[1](cotangents)[0]


def _chosen(e: Execution, kernel: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any) -> Any:
    if e.interpret is not False:
        return kernel(*args)
    return kernel_or_else(kernel, elsewhere if e.choose else None, *args)  # the lowering knows what it will run on


def _by_kernel(e: Execution, operands: Operands) -> Outputs:
    out, _ = _before_norm(e, e.forward, operands)
    if e.signature.norm is None or _norms(e.forward):
        return out
    o, *states = out
    return finish(jnp, e.signature, operands, o), *states


def _before_norm(
    e: Execution, p: Pipeline | Plan, operands: Operands, probe: tuple[str, ...] = ()
) -> tuple[Outputs, Operands]:
    """Compute the call up to its output norm, or with it if the kernel includes it, and what the backward pass needs.

    A norm after the kernel reads an output with the bits of the inputs, unless products round nothing.
    """
    s = e.signature
    if s.norm is not None and not _norms(p):
        s = replace(s, norm=None, dtype="float32" if s.precision == "highest" else s.dtype)
    if isinstance(p, Pipeline):
        return by_pipeline(s, p, e.interpret, operands)
    return by_plain_kernel(e.of(s), p, operands, probe)


def _norms(p: Pipeline | Plan) -> bool:
    """Return whether a kernel computes the output norm itself."""
    return isinstance(p, Pipeline) and p.norm is not None


def _rule_operands(s: Signature, p: Plan, x: Prepared) -> PlainOperands:
    """Return q, k, v and the gates in the form that the plain kernels take."""
    # What the products would round anyway is rounded before it travels; v only where it is exact.
    keys = jnp.float32 if p.q_bytes == 4 else jnp.bfloat16
    values = jnp.float32 if p.v_bytes == 4 else jnp.bfloat16
    g = jnp.repeat(x.g, p.widths.decay // x.g.shape[-1], axis=-1)  # many groups are computed channel by channel
    gates = [a for a in (g, x.b, None if p.widths.shared else x.w) if a is not None]
    return PlainOperands(x.q.astype(keys), x.k.astype(keys), x.v.astype(values), tuple(gates))


def by_plain_kernel(e: Execution, p: Plan, operands: Operands, probe: tuple[str, ...] = ()) -> tuple[Outputs, Operands]:
    """Compute a call by the plain kernel, and return what it shows of each chunk by name (``plain.forward.PROBED``)."""
    s = e.signature
    x, reached = separated(prepare(jnp, s, operands))
    S = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), x.v) if x.S is None else x.S
    bounds = operands.get("cu_seqlens")
    rule = _rule_operands(s, p, x)
    o, state, stage = forward(p, rule, S, bounds, Making(e.interpret, e.stages), probe)
    o, state = marked(o, state, reached)
    return (
        finish(jnp, s, operands, o),
        swap_state(jnp, s, state) if s.output_final_state else None,
        x.conv_state,
    ), stage


def _by_backward_kernel(e: Execution, operands: Operands, kept: Operands, cotangents: Outputs) -> Operands:
    """Return the operands' cotangents: of the rule by the kernel, of the prologue by the specification."""
    s, bounds = e.signature, operands.get("cu_seqlens")
    assert e.training is not None
    dO, dS, d_conv_state = cotangents
    p = e.training.backward
    of_norm: Operands = {}
    read_by_norm = kept.get("o")
    kept = {name: a for name, a in kept.items() if name != "o"}
    norm_inside = isinstance(p, Reverse) and p.norm is not None
    if s.norm is not None and not norm_inside:
        assert read_by_norm is not None
        dO, of_norm = through_norm(s, e.chip, e.interpret, operands, read_by_norm, dO)
    before = inside(s, e.chip, e.interpret, operands)
    starts = reached = None
    if before is not None:
        names, keys, values = _rule_dtypes(p)
        x = before.prepared(names, keys, values)
        pull = before.pulled
        d_conv_state = d_conv_state if s.output_final_state else None  # else nobody is given that state
    else:

        def before_the_rule(smooth: Operands) -> tuple[Prepared, Array | None]:
            x = prepare(jnp, s, {**operands, **smooth})
            return x._replace(starts=None), x.starts

        x, pull_smooth, starts = jax.vjp(before_the_rule, _smooth(operands), has_aux=True)
        pull = lambda d: pull_smooth(d)[0]  # noqa: E731
        x, reached = separated(x._replace(starts=starts))
    if s.has("mask"):
        dO = jnp.where(operands["mask"][..., None, None], dO, jnp.zeros((), dO.dtype))
    if dO.dtype == jnp.float32 and s.precision != "highest" and not norm_inside:
        dO = dO.astype(jnp.bfloat16)  # as the products would round it
    dS = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), dO) if dS is None else swap_state(jnp, s, dS)
    if reached is not None:
        dO, dS, affected = isolation.clean_cotangents(dO, dS, starts, reached)
    dtypes = _gradient_dtypes(s)
    d: RuleGradients
    if isinstance(p, Reverse):
        assert x.b is not None
        q, k = (a.astype(jnp.bfloat16) for a in (x.q, x.k))
        norm = norm_operands(s, operands, read_by_norm) if read_by_norm is not None and norm_inside else None
        rule = ReverseOperands(q, k, x.g[..., 0], x.b[..., 0], norm)
        d, *found = reverse(p, rule, Kept(**kept), Cotangents(dO, dS), dtypes=dtypes, interpret=e.interpret)
        of_norm |= as_given(operands, *found) if norm_inside else {}
    else:
        made_of = Making(e.interpret, e.stages)
        d = backward(p, _rule_operands(s, p, x), Kept(**kept), Cotangents(dO, dS), bounds, dtypes, made_of)
    # The prologue's own kernel leaves out tokens of no sequence by itself.
    channels = d[:3] if before is not None else [where_sequences_are(s, bounds, a).astype(jnp.float32) for a in d[:3]]
    g, *rest = d.gates
    rest = [where_sequences_are(s, bounds, a).astype(jnp.float32) for a in rest]
    if before is None or before.gate_plan is None:  # else its kernel leaves such tokens out, too
        g = where_sequences_are(s, bounds, g).astype(jnp.float32)
    q, k, v = channels
    if g.shape != x.g.shape:
        g = jnp.sum(jnp.reshape(g, (*x.g.shape, -1)), -1)  # over the channels that share a decay
    b = w = None
    if x.b is not None:
        b = rest.pop(0)
    if x.w is not None:
        w = jnp.zeros_like(x.w) if widths(s).shared else rest.pop(0)
    state = d.S
    if reached is not None:
        (q, k, v, g, b, w), state = isolation.mark_gradients([q, k, v, g, b, w], state, affected)
    return pull(Prepared(q, k, v, g, b, w, None if x.S is None else state, None, d_conv_state)) | of_norm


def _rule_dtypes(p: Reverse | Plan) -> tuple[str, Any, Any]:
    """Return which of q, k and v a backward kernel reads, and the dtypes in which it reads keys and values."""
    if isinstance(p, Reverse):
        return "qk", jnp.bfloat16, jnp.bfloat16
    of = {2: jnp.bfloat16, 4: jnp.float32}
    return "qkv", of[p.q_bytes], of[p.v_bytes]


def _gradient_dtypes(s: Signature) -> tuple[Any, Any]:
    """Return the dtypes of the gradients of q and k, and of v, as the kernel writes them: those of the operands, unless
    the call has a prologue."""
    operand = jnp.dtype(s.dtype)
    values = jnp.float32 if s.conv is not None else operand
    return (jnp.float32 if s.qk_l2norm else values), values
