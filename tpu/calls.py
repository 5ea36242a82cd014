"""A whole call around the kernel: what lies before the rule, the kernel, the output's form, and the gradient's rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..spec import jax_isolation as isolation
from ..spec.errors import GdnError
from ..spec.jax_tracing import axes_of, own_settings, varying, varying_like
from ..spec.operands import DIFFERENTIABLE
from ..spec.pieces import run_by_pieces
from ..spec.problem import Problem, Result, Signature
from ..spec.prologue import Prepared, finish, prepare, swap_state
from .kernels import stages as own_stages
from .kernels.backward import RuleGradients, backward
from .kernels.forward import forward
from .kernels.reverse import reverse
from .pipeline_plan import Pipeline, pipeline
from .pipelined import by_pipeline, core
from .plan import CHUNK, Plan, backward_plan, plan, widths
from .reverse_plan import Reverse, reverse_plan
from .segments import marked, separated

__all__ = ["KEPT", "by_plain_kernel", "compute", "compute_gradients", "compute_with_states"]

Array = Any
Outputs = tuple[Array, Array | None, Array | None]

#: The name of what the forward pass keeps for the backward pass, for policies of ``jax.checkpoint``.
KEPT = "gated_delta_rule_kept"

#: Computes the same call without the kernels: where there is no TPU, and for second derivatives.
Other = Callable[[Signature, dict[str, Array]], Outputs]


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
@own_settings
def compute(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]
) -> Outputs:
    """o, states and convolution state of a call, in the caller's layout and dtypes.

    Args:
        interpret: False (for a TPU), True or ``pltpu.InterpretParams``.
        stages: the functions that the kernel is made of.
        other: if ``choose``, what the compiler takes for anything but a TPU; and differentiated for second derivatives,
            and where there is no backward kernel for the call.
        choose: leave it to the compiler which of both to take, where the operands are traced and not interpreted.
    """
    return _call(s, interpret, stages, other, choose, _varying(interpret, operands))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
@own_settings
def compute_with_states(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, every: int, operands: dict[str, Array]
) -> tuple[Outputs, Array]:
    """The same, and the states behind every so many tokens [B, T // every, ...]; rows are sequences."""
    operands = _varying(interpret, operands)
    line = pipeline(s, core(), ("S",)) if stages is own_stages and every % CHUNK == 0 else None
    if line is None:
        run = lambda problem: Result(*_call(problem.signature, interpret, stages, other, choose, problem.operands))  # noqa: E731
        result, states = run_by_pieces(run, Problem(s, operands), every)
        return tuple(result), states
    return _with_states_every(s, interpret, stages, other, choose, every, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4, 5))
@own_settings
def _with_states_every(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, every: int, operands: dict[str, Array]
) -> tuple[Outputs, Array]:
    def kernel(operands: dict[str, Array]) -> tuple[Outputs, Array]:
        line = pipeline(s, core(), ("S",))
        assert line is not None
        (o, state, conv_state), kept = by_pipeline(replace(s, output_final_state=True), line, interpret, operands)
        before = swap_state(jnp, s, jnp.reshape(kept["S"], (s.B, line.blocks, *kept["S"].shape[1:])))
        chunks = every // CHUNK  # those behind a chunk are those before the next one, or the last
        found = jnp.concatenate([before, state[:, None]], 1)[:, chunks : s.T // CHUNK + 1 : chunks]
        return (o, state if s.output_final_state else None, conv_state), found

    return _chosen(s, interpret, choose, kernel, partial(_other_by_pieces, s, other, every), operands)


def _other_by_pieces(s: Signature, other: Other, every: int, operands: dict[str, Array]) -> tuple[Outputs, Array]:
    run = lambda problem: Result(*other(problem.signature, problem.operands))  # noqa: E731
    result, states = run_by_pieces(run, Problem(s, operands), every)
    return tuple(result), states


@own_settings
def _with_states_every_backward(
    s: Signature, _: Any, __: Any, other: Other, ___: bool, every: int, operands: Any, cotangents: Any
) -> Any:
    outputs = lambda smooth: _other_by_pieces(s, other, every, {**operands, **smooth})  # noqa: E731
    return ({**dict.fromkeys(operands), **jax.vjp(outputs, _smooth(operands))[1](cotangents)[0]},)


_with_states_every.defvjp(lambda *args: (_with_states_every(*args), args[-1]), _with_states_every_backward)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
@own_settings
def compute_gradients(
    s: Signature,
    interpret: Any,
    stages: Any,
    other: Other,
    choose: bool,
    operands: dict[str, Array],
    cotangents: dict[str, Array],
) -> tuple[Outputs, dict[str, Array]]:
    """The same, and the cotangents of the float operands from those of "o" and "state"; missing ones are zeros."""

    def outputs(smooth: dict[str, Array]) -> tuple[dict[str, Array], Outputs]:
        result = _call(s, interpret, stages, other, choose, {**operands, **smooth})
        return {"o": result[0], "state": result[1]}, result

    out, pull, result = jax.vjp(outputs, _smooth(operands), has_aux=True)
    full = {name: None if value is None else cotangents.get(name, jnp.zeros_like(value)) for name, value in out.items()}
    return result, pull(full)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
@own_settings
def _call(s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]) -> Outputs:
    return _chosen(s, interpret, choose, partial(_by_kernel, s, interpret, stages), partial(other, s), operands)


@own_settings
def _forward(s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]) -> Any:
    """The call, and what the backward pass needs beside the operands."""
    if _plans(s, stages) is None:
        return _call(s, interpret, stages, other, choose, operands), (operands, None)
    out, kept = _keeping(s, interpret, stages, other, choose, operands)
    return out, (operands, {name: checkpoint_name(a, KEPT) for name, a in kept.items()})


@own_settings
def _backward(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, saved: Any, cotangents: Any
) -> Any:
    operands, kept = saved
    if kept is None:
        found = _pull_other(s, other, operands, cotangents)
    else:
        found = _pull(s, interpret, stages, other, choose, operands, kept, cotangents)
    return ({**dict.fromkeys(operands), **found},)


_call.defvjp(_forward, _backward)


def _plans(s: Signature, stages: Any) -> tuple[Any, Any] | None:
    """Plans of the kernels that compute a call's forward pass, keeping what the backward pass needs, and that."""
    own = stages is own_stages
    pair = reverse_plan(s, core()) if own else None
    if pair is not None:
        return pair
    p = backward_plan(s, core())
    if p is None:
        return None
    line = None
    if own and p.C == CHUNK:
        solved = ("S", "M", "u", "Aqk") if p.widths.erase else ("S", "Aqk")
        line = pipeline(s, core(), solved if widths(s).decay == s.K else ("S",))
    return line or p._replace(widths=widths(s)), p


# Both halves of the gradient have gradients too: second derivatives are those of the other backend.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
@own_settings
def _keeping(
    s: Signature, interpret: Any, stages: Any, other: Other, choose: bool, operands: dict[str, Array]
) -> tuple[Outputs, dict[str, Array]]:
    """The call, and what its chunks leave to the backward pass."""
    plans = _plans(s, stages)
    assert plans is not None

    def kernel(operands: dict[str, Array]) -> tuple[Outputs, dict[str, Array]]:
        if isinstance(plans[0], Pipeline):
            return by_pipeline(s, plans[0], interpret, operands)
        return by_plain_kernel(s, plans[0], interpret, stages, operands, ("S",))

    def elsewhere(operands: dict[str, Array]) -> tuple[Outputs, dict[str, Array]]:
        kept = jax.eval_shape(kernel, operands)[1]  # zeros, which nobody reads
        zeros = {name: jnp.zeros(a.shape, a.dtype) for name, a in kept.items()}
        return other(s, operands), varying_like(zeros, *operands.values())

    return _chosen(s, interpret, choose, kernel, elsewhere, operands)


@own_settings
def _keeping_backward(s: Signature, _: Any, __: Any, other: Other, ___: bool, operands: Any, cotangents: Any) -> Any:
    return ({**dict.fromkeys(operands), **_pull_other(s, other, operands, cotangents[0])},)


_keeping.defvjp(lambda *args: (_keeping(*args), args[-1]), _keeping_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
@own_settings
def _pull(
    s: Signature,
    interpret: Any,
    stages: Any,
    other: Other,
    choose: bool,
    operands: dict[str, Array],
    kept: dict[str, Array],
    cotangents: Outputs,
) -> dict[str, Array]:
    """Cotangents of the float operands."""

    def elsewhere(operands: dict[str, Array], kept: dict[str, Array], cotangents: Outputs) -> dict[str, Array]:
        return _pull_other(s, other, operands, cotangents)

    kernel = partial(_by_backward_kernel, s, interpret, stages)
    return _chosen(s, interpret, choose, kernel, elsewhere, operands, kept, cotangents)


@own_settings
def _pull_backward(s: Signature, _: Any, __: Any, other: Other, ___: bool, saved: Any, second: Any) -> Any:
    operands, cotangents = saved
    smooth = _smooth(operands)
    pull = lambda smooth, cotangents: _pull_other(s, other, {**operands, **smooth}, cotangents)  # noqa: E731
    d_smooth, d_cotangents = jax.vjp(pull, smooth, cotangents)[1](second)
    return {**dict.fromkeys(operands), **d_smooth}, None, d_cotangents


_pull.defvjp(lambda *args: (_pull(*args), (args[-3], args[-1])), _pull_backward)


def _varying(interpret: Any, operands: dict[str, Array]) -> dict[str, Array]:
    """The operands as ``jax.shard_map`` wants them, alike in the axes that they vary over.

    Raises:
        GdnError: Pallas' interpreters compute nothing where ``shard_map`` keeps count of such axes.
    """
    if interpret is not False and axes_of(*operands.values()):
        raise GdnError(
            "backend 'pallas-interpret' is called inside jax.shard_map with check_vma=True, which Pallas' interpreter "
            "cannot take; give shard_map check_vma=False, or take backend 'xla' or 'pallas'."
        )
    return varying(operands)


def _smooth(operands: dict[str, Array]) -> dict[str, Array]:
    return {name: a for name, a in operands.items() if name in DIFFERENTIABLE}


def _pull_other(s: Signature, other: Other, operands: dict[str, Array], cotangents: Outputs) -> dict[str, Array]:
    return jax.vjp(lambda smooth: other(s, {**operands, **smooth}), _smooth(operands))[1](cotangents)[0]


def _chosen(s: Signature, interpret: Any, choose: bool, kernel: Any, elsewhere: Any, *args: Any) -> Any:
    if choose and s.traced and interpret is False:  # what it will run on is the compiler's to know
        return lax.platform_dependent(*args, tpu=kernel, default=elsewhere)
    return kernel(*args)


def _by_kernel(s: Signature, interpret: Any, stages: Any, operands: dict[str, Array]) -> Outputs:
    line = pipeline(s, core()) if stages is own_stages else None
    if line is not None:
        return by_pipeline(s, line, interpret, operands)[0]
    return by_plain_kernel(s, plan(s, core()), interpret, stages, operands)[0]


def _rule_operands(s: Signature, p: Plan, x: Prepared) -> tuple[Array, ...]:
    """q, k, v and the gates as the plain kernels take them."""
    # What the products would round anyway is rounded before it travels; v only where it is exact.
    keys = jnp.float32 if p.q_bytes == 4 else jnp.bfloat16
    values = jnp.float32 if p.v_bytes == 4 else jnp.bfloat16
    g = jnp.repeat(x.g, p.widths.decay // x.g.shape[-1], axis=-1)  # many groups are computed channel by channel
    gates = [a for a in (g, x.b, None if p.widths.shared else x.w) if a is not None]
    return x.q.astype(keys), x.k.astype(keys), x.v.astype(values), gates


def by_plain_kernel(
    s: Signature, p: Plan, interpret: Any, stages: Any, operands: dict[str, Array], probe: tuple[str, ...] = ()
) -> tuple[Outputs, dict[str, Array]]:
    """A call by the plain kernel, and by name what it is asked to show of each chunk (``kernels.forward.PROBED``)."""
    x, reached = separated(prepare(jnp, s, operands))
    S = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), x.v) if x.S is None else x.S
    bounds = operands.get("cu_seqlens")
    rule = _rule_operands(s, p, x)
    o, state, stage = forward(p, *rule, S, bounds, interpret=interpret, stages=stages, probe=probe)
    o, state = marked(o, state, reached)
    return (
        finish(jnp, s, operands, o),
        swap_state(jnp, s, state) if s.output_final_state else None,
        x.conv_state,
    ), stage


def _by_backward_kernel(
    s: Signature, interpret: Any, stages: Any, operands: dict[str, Array], kept: dict[str, Array], cotangents: Outputs
) -> dict[str, Array]:
    """Cotangents of the operands: the rule's by the kernel, and through what lies before it as the specification's."""
    plans, bounds = _plans(s, stages), operands.get("cu_seqlens")
    assert plans is not None

    def before_the_rule(smooth: dict[str, Array]) -> tuple[Prepared, Array | None]:
        x = prepare(jnp, s, {**operands, **smooth})
        return x._replace(starts=None), x.starts

    x, pull, starts = jax.vjp(before_the_rule, _smooth(operands), has_aux=True)
    x, reached = separated(x._replace(starts=starts))
    dO, dS, d_conv_state = cotangents
    if s.has("mask"):
        dO = jnp.where(operands["mask"][..., None, None], dO, jnp.zeros((), dO.dtype))
    if dO.dtype == jnp.float32 and s.precision != "highest":
        dO = dO.astype(jnp.bfloat16)  # as the products would round it
    dS = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), dO) if dS is None else swap_state(jnp, s, dS)
    if reached is not None:
        dO, dS, affected = isolation.clean_cotangents(dO, dS, starts, reached)
    p, dtypes = plans[1], _gradient_dtypes(s)
    d: RuleGradients
    if isinstance(p, Reverse):
        keys = (a.astype(jnp.bfloat16) for a in (x.q, x.k))
        held = (kept[name] for name in ("S", "M", "u"))
        d = reverse(p, *keys, x.g[..., 0], x.b[..., 0], *held, dO, dS, dtypes=dtypes, interpret=interpret)
    else:
        rule = _rule_operands(s, p, x)
        d = backward(p, *rule, kept, dO, dS, bounds, dtypes=dtypes, interpret=interpret, stages=stages)
    q, k, v, g, *rest = (_where_sequences_are(s, bounds, a).astype(jnp.float32) for a in (*d[:3], *d.gates))
    g = jnp.sum(jnp.reshape(g, (*x.g.shape, -1)), -1)  # over the channels that share a decay
    b = w = None
    if x.b is not None:
        b = rest.pop(0)
    if x.w is not None:
        w = jnp.zeros_like(x.w) if widths(s).shared else rest.pop(0)
    state = d.S
    if reached is not None:
        (q, k, v, g, b, w), state = isolation.mark_gradients([q, k, v, g, b, w], state, affected)
    return pull(Prepared(q, k, v, g, b, w, None if x.S is None else state, None, d_conv_state))[0]


def _where_sequences_are(s: Signature, bounds: Array | None, x: Array) -> Array:
    """Zeros behind the last of boundaries that nobody could check: no chunk has been there."""
    if bounds is None:
        return x
    there = jnp.arange(s.T) < jnp.asarray(bounds)[-1]
    return jnp.where(jnp.reshape(there, (s.T, *(1,) * (x.ndim - 2))), x, jnp.zeros((), x.dtype))


def _gradient_dtypes(s: Signature) -> tuple[Any, Any]:
    """Of q and k, and of v, as they leave the kernel: the operands', unless something lies before the rule."""
    operand = jnp.dtype(s.dtype)
    values = jnp.float32 if s.conv is not None else operand
    return (jnp.float32 if s.qk_l2norm else values), values
