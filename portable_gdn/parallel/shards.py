"""Run a split call: one ``jax.shard_map`` over the mesh, in which every device makes a call with its own shard.

Rows and heads are independent, so no array with tokens moves between devices. The convolution's operands for the
channels q | k | v (weights, bias, state) are separated into those of q, k and v, each of which is split by heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..door import normalise
from ..spec.conv import final_state
from ..spec.jax_tracing import own_settings
from ..spec.operands import WITH_TOKENS
from ..spec.problem import Options, Result
from ..spec.sequences import layout
from .heads import own_heads, own_key_heads
from .placement import role_of
from .split_call import Call
from .tokens import run_piece, tokens_each

__all__ = ["run_shards"]

Array = Any
Operands = dict[str, Array]

#: Operands of the convolution, and the axis of each that has the channels of q, k and v side by side.
_CONV_CHANNELS = {"conv_weight": 0, "conv_bias": 0, "conv_state": -1}


@partial(jax.jit, static_argnums=0)
@own_settings
def run_shards(call: Call, operands: Operands) -> tuple[Result, Array | None]:
    """Return the whole result of a call, and the intermediate states if they were requested.

    Args:
        call: The call, and how it is split.
        operands: The whole arrays.
    """
    operands = _in_whole_pieces(call, operands)
    parts = _taken_apart(call, operands)
    specs = {name: _spec(call, name, jnp.ndim(a)) for name, a in parts.items()}
    placed = {name: _placed(call, a, specs[name]) for name, a in parts.items()}
    split = call.split
    found = jax.shard_map(
        partial(_shard, call),
        mesh=split.mesh,
        in_specs=(specs,),
        out_specs=_out_specs(call),
        axis_names=split.manual,
        check_vma=call.counts_axes,
    )(placed)
    conv_state = found["conv_state"]
    if isinstance(conv_state, list):
        whole = _spec(call, "conv_state", 3)
        conv_state = _placed(call, jnp.concatenate([_placed(call, a, whole) for a in conv_state], axis=-1), whole)
    o = found["o"]
    if call.split.sequence and o.shape[1] != call.signature.T:
        o = o[:, : call.signature.T]
    return Result(o, found["state"], conv_state), found["states"]


def _in_whole_pieces(call: Call, operands: Operands) -> Operands:
    """Pad the operands with zero tokens until the pieces of all devices have the same length."""
    s, split = call.signature, call.split
    if not split.sequence:
        return operands
    parts = split.parts("sequence")
    more = tokens_each(s, parts) * parts - s.T
    widths = lambda a: [(0, 0), (0, more), *[(0, 0)] * (a.ndim - 2)]  # noqa: E731
    how = lambda name: "edge" if name == "segment_ids" else "constant"  # noqa: E731
    return {n: jnp.pad(a, widths(a), how(n)) if more and n in WITH_TOKENS else a for n, a in operands.items()}


def _cut(call: Call) -> tuple[int, int]:
    """Return the channels at which k and v begin in q | k | v."""
    keys = call.signature.H * call.signature.K
    return keys, 2 * keys


def _taken_apart(call: Call, operands: Operands) -> Operands:
    """Return the operands in the form in which they are split: q | k | v as three arrays."""
    s = call.signature
    if s.conv is None or not call.split.heads:
        return operands
    found = {}
    for name, a in operands.items():
        axis = -1 if name == "qkv" else _CONV_CHANNELS.get(name)
        if axis is None:
            found[name] = a
            continue
        # Whole on every device before and after the cut: XLA would else move pieces of a few channels to and fro.
        spec = _spec(call, name, a.ndim)
        for part, piece in zip("qkv", jnp.split(_placed(call, a, spec), _cut(call), axis=axis), strict=True):
            found[part if name == "qkv" else f"{name}.{part}"] = _placed(call, piece, spec)
    return found


def _spec(call: Call, name: str, ndim: int) -> PartitionSpec:
    """Return the ``PartitionSpec`` of an operand, or of a part of one."""
    s, split = call.signature, call.split
    name, _, part = name.partition(".")
    roles = list(role_of(s, name, ndim))
    if part:
        roles[_CONV_CHANNELS[name]] = "heads"
    if (part or name) in ("q", "k") and not split.splits_keys(s):
        roles = [None if role == "heads" else role for role in roles]
    return PartitionSpec(*[(getattr(split, role) or None) if role else None for role in roles])


def _placed(call: Call, a: Array, spec: PartitionSpec) -> Array:
    """Return the array with this sharding: by a constraint or, if axes are explicit, by ``jax.sharding.reshard``."""
    mesh = call.split.mesh
    where = NamedSharding(mesh, spec)
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(jnp.asarray(a), where)
    return lax.with_sharding_constraint(a, where)


def _out_specs(call: Call) -> dict[str, Any]:
    s, split = call.signature, call.split
    batch, heads, sequence = (axes or None for axes in (split.batch, split.heads, split.sequence))
    rows = None if s.packed else batch
    conv: Any = None
    if s.conv is not None:
        conv = PartitionSpec(rows)
        if split.heads:
            keys = PartitionSpec(rows, None, heads if split.splits_keys(s) else None)
            conv = [keys, keys, PartitionSpec(rows, None, heads)]
    return {
        "o": PartitionSpec(batch, heads) if s.step else PartitionSpec(batch, sequence, heads),
        "state": PartitionSpec(rows, heads) if s.output_final_state else None,
        "conv_state": conv,
        "states": None if call.every is None else PartitionSpec(batch, None, heads),
    }


def _shard(call: Call, x: Operands) -> dict[str, Any]:
    """Make one device's call with its own shard."""
    s, split, options = call.signature, call.split, call.options
    conv_state: Any = None
    H = s.H
    if split.heads:
        n = split.parts("heads")
        keys = None
        if split.splits_keys(s):
            H //= n
        else:
            if s.conv is not None:
                conv_state = _conv_states_of_keys(call, x)
            keys, H = own_key_heads(s.H, s.HV, n, lax.axis_index(split.heads))
            x = {name: _keys_of(call, name, a, keys) for name, a in x.items()}
        x = _joined(x)
    if s.conv is not None:
        options = options._replace(num_heads=H, key_dim=s.K)
    states = None
    if split.sequence:
        result = _piece(call, x, H, options)
    else:
        problem, chosen = normalise(x, options, call.backend)
        if call.every is None:
            result = chosen.run(problem)
        else:
            result, states = chosen.run_with_states(problem, call.every)
    if split.heads and s.conv is not None:
        assert result.conv_state is not None
        own = jnp.split(result.conv_state, (H * s.K, 2 * H * s.K), axis=-1)
        conv_state = own if conv_state is None else [*conv_state, own[2]]
    elif s.conv is not None:
        conv_state = result.conv_state
    return {"o": result.o, "state": result.state, "conv_state": conv_state, "states": states}


def _piece(call: Call, x: Operands, H: int, options: Options) -> Result:
    """Compute this device's piece of the tokens."""
    s, split = call.signature, call.split
    HV, conv = s.HV // split.parts("heads"), s.conv
    if conv is not None:
        conv = conv._replace(channels=2 * H * s.K + HV * s.V, fused="qkv" in x)
    size = tokens_each(s, split.parts("sequence"))
    B, N = s.B // split.parts("batch"), s.N if s.packed else s.N // split.parts("batch")
    own = replace(s, B=B, N=N, T=size, H=H, HV=HV, conv=conv, operands=tuple(x))
    return run_piece(own, options, call.backend, x, split.sequence, s.T)


def _joined(x: Operands) -> Operands:
    """Concatenate the convolution's operands to the channels q | k | v again."""
    found = {name: a for name, a in x.items() if "." not in name}
    for name, axis in _CONV_CHANNELS.items():
        if f"{name}.q" in x:
            found[name] = jnp.concatenate([x[f"{name}.{part}"] for part in "qkv"], axis=axis)
    return found


def _keys_of(call: Call, name: str, a: Array, heads: Array) -> Array:
    """Select this device's key heads of an operand that has all of them; return any other operand unchanged."""
    whole, _, part = name.partition(".")
    if (part or whole) not in ("q", "k"):
        return a
    s = call.signature
    if part:
        axis = _CONV_CHANNELS[whole] % a.ndim
    else:
        axis = 1 if s.step else 2
    return own_heads(a, axis, s.H, heads)


def _conv_states_of_keys(call: Call, x: Operands) -> list[Array]:
    """Return the convolution's states of q and k as a whole: every device holds them if the key heads are not split."""
    conv = call.signature.conv
    assert conv is not None
    found = []
    for part in "qk":
        a, before = x[part], x.get(f"conv_state.{part}")
        a = a[:, None] if call.signature.step else a
        place = layout(jnp, a, x.get("cu_seqlens"), x.get("segment_ids"), x.get("mask"))
        given = None if before is None else before.astype(jnp.float32)
        found.append(final_state(jnp, a.astype(jnp.float32), place, given, conv.width))
    return found
