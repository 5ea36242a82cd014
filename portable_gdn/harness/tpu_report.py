"""What a call of the rule costs on a TPU: the call built from its dimensions, compiled, and its cycles by head.

Nothing is computed: the arguments are shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..spec.errors import GdnError, bad
from ..spec.operands import GATES
from .compiled import compiled_for
from .shapes import OPERATIONS, VARIANTS, Shape, check_shape, operand_shapes

__all__ = ["OPERATIONS", "VARIANTS", "Shape", "TpuReport", "call", "tpu_reports"]


class TpuReport(NamedTuple):
    """A call compiled for a chip; schedule: ``portable_gdn.tpu.schedule``'s; plan: which kernel, how, and why."""

    op: str
    variant: str
    fused: bool
    precision: str | None
    shape: Shape
    schedule: Any
    plan: str = ""

    @property
    def cycles_per_head_128(self) -> float | None:
        """Cycles of the kernels for each value head and 128 tokens."""
        s = self.shape
        cycles = self.schedule.cycles
        return None if cycles is None else cycles / (s.batch * s.value_heads * s.seqlen / 128)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.schedule.as_dict()
        return {
            "chip": found.pop("chip"),
            "op": self.op,
            "variant": self.variant,
            "fused": self.fused,
            "precision": self.precision,
            "shape": self.shape._asdict(),
            "plan": self.plan,
            "kernels": found.pop("kernels"),
            "total": {**found.pop("total"), "cycles_per_head_128": self.cycles_per_head_128},
            **found,
        }


def call(
    op: str,
    variant: str,
    shape: Shape,
    *,
    precision: str | None = None,
    fused: bool = False,
    sharding: Any = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of JAX arrays that makes the call on ``pallas``, and the shapes of its arguments.

    Args:
        op, variant, shape, precision, fused: what is called.
        sharding: a ``portable_gdn.Sharding`` with a mesh over which the rule's call is split and its arguments lie.

    Raises:
        GdnError: an argument is wrong, or no Pallas kernel serves such a call.
    """
    import jax
    import jax.numpy as jnp

    from ..api import gated_delta_rule, gated_delta_rule_step

    check_shape(op, variant, shape)
    if fused and (op == "step" or VARIANTS[variant][0] is None):
        raise GdnError(
            "--fused is for --op forward or backward of variants with a decay: no other call has kernels for all of it."
        )
    given = operand_shapes(op, variant, shape)
    x = {name: jax.ShapeDtypeStruct(dims, getattr(jnp, dtype)) for name, (dims, dtype) in given.items()}
    if sharding is not None:
        x = {name: _placed(a, sharding, shape.value_heads) for name, a in x.items()}
    if op == "step":
        state = jax.ShapeDtypeStruct((shape.batch, shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32)
        return lambda x, S: gated_delta_rule_step(**x, state=S, precision=precision, backend="pallas"), (x, state)

    if fused:
        whole = _mixer(shape, precision, {name: x[name] for name in GATES if name in x})
        return whole if op == "forward" else _training(*whole)
    if shape.sequences:
        x["cu_seqlens"] = jax.ShapeDtypeStruct((shape.sequences + 1,), jnp.int32)
        states = (shape.sequences, shape.value_heads, shape.key_dim, shape.value_dim)
        x["initial_state"] = jax.ShapeDtypeStruct(states, jnp.float32)

    def forward(x: dict[str, Any]) -> Any:
        return gated_delta_rule(**x, output_final_state=True, precision=precision, backend="pallas", sharding=sharding)

    if op == "backward":

        def both(x: dict[str, Any], cotangents: Any) -> Any:
            bounds = {name: x[name] for name in x if name == "cu_seqlens"}
            floats = {name: x[name] for name in x if name not in bounds}
            o, pull = jax.vjp(lambda floats: forward({**floats, **bounds})[0], floats)
            return o, pull(cotangents)[0]

        return both, (x, x["v"])
    return forward, (x,)


def _placed(a: Any, sharding: Any, value_heads: int) -> Any:
    """The shape [B, T, heads, ...] with its place on the mesh; key heads that do not divide lie whole."""
    import jax

    batch, heads, sequence = (sharding.axes(role) or None for role in ("batch", "heads", "sequence"))
    if heads is not None and a.shape[2] % math.prod(sharding.mesh.shape[name] for name in heads):
        if a.shape[2] == value_heads:
            raise bad("--value-heads", value_heads, f"be a multiple of the {sharding.mesh.size} devices")
        heads = None
    where = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(batch, sequence, heads))
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)


def _mixer(shape: Shape, precision: str | None, gates: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A whole mixer: convolution of width 4 and silu, l2norm, softplus gate, from one array of channels."""
    import jax
    import jax.numpy as jnp

    from ..api import MixerState, gated_delta_mixer
    from ..spec.conv import ShortConv
    from ..spec.gates import SoftplusGate

    B, T, H, HV, K, V, dtype, _, N = shape
    channels = 2 * H * K + HV * V
    array = lambda *dims, of="float32": jax.ShapeDtypeStruct(dims, getattr(jnp, of))  # noqa: E731

    def forward(qkv: Any, gates: dict[str, Any], weight: Any, A_log: Any, dt_bias: Any, *packed: Any) -> Any:
        return gated_delta_mixer(
            qkv,
            **gates,
            conv=ShortConv(weight),
            num_heads=H,
            key_dim=K,
            qk_l2norm=True,
            gate=SoftplusGate(A_log, dt_bias),
            state=MixerState(*packed[1:]) if packed else None,
            cu_seqlens=packed[0] if packed else None,
            output_final_state=True,
            precision=precision,
            backend="pallas",
        )

    packed = (array(N + 1, of="int32"), array(N, HV, K, V), array(N, 3, channels)) if N else ()
    return forward, (
        array(B, T, channels, of=dtype), gates, array(channels, 4), array(HV), array(*gates["g"].shape[2:]), *packed,
    )  # fmt: skip


def _training(forward: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The output of a mixer and the gradients of all its float arguments, from the output's cotangent."""
    import jax
    import jax.numpy as jnp

    floats = [i for i, a in enumerate(given) if isinstance(a, dict) or jnp.issubdtype(a.dtype, jnp.floating)]

    def both(given: tuple[Any, ...], cotangent: Any) -> Any:
        def output(some: list[Any]) -> Any:
            args = list(given)
            for i, a in zip(floats, some, strict=True):
                args[i] = a
            return forward(*args)[0]

        o, pull = jax.vjp(output, [given[i] for i in floats])
        return o, pull(cotangent)[0]

    return both, (given, jax.eval_shape(lambda *args: forward(*args)[0], *given))


def tpu_reports(
    op: str,
    variant: str,
    shape: Shape,
    chips: Sequence[str],
    *,
    precision: str | None = None,
    fused: bool = False,
    use_cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[TpuReport | GdnError]:
    """Reports of one call, a chip each, or why there is none.

    Raises:
        GdnError: an argument is wrong, no Pallas kernel serves such a call, or nothing can be compiled here.
    """
    found = compiled_for(
        chips,
        lambda: call(op, variant, shape, precision=precision, fused=fused),
        use_cache=use_cache,
        progress=progress,
    )
    return [
        s if isinstance(s, GdnError) else TpuReport(op, variant, fused, precision, shape, s, plan) for s, plan in found
    ]
