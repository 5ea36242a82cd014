"""An update of a pool of states on a TPU: tokens that go step by step by the window kernel, in the pool's own slots."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.xla_backend import chunk_size
from ..backends.xla_chunks import product
from ..backends.xla_update import Steps, Under, updated
from ..spec.jax_tracing import own_settings
from ..spec.operands import BATCH_OPERANDS
from ..spec.slots import CONV, RECURRENT
from ..spec.stages import RESET, Algebra
from .execution import Execution
from .kernels.pipelined.prologue import HISTORY
from .kernels.window.chunk import ChunkOperands
from .kernels.window.forward import CHECKPOINTS, WindowOperands, windows
from .kernels.window.plan import TAPS, Window, window_plan
from .lowering import kernel_or_else

__all__ = ["update"]

Array = Any
Arrays = dict[str, Array]
_READ = "batch.read_state_indices"
assert _READ in BATCH_OPERANDS


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@own_settings
def update(e: Execution, operands: Arrays, pool: Arrays) -> tuple[Array, Arrays]:
    """The outputs of an update and its pool, whose memory the new one takes."""
    s = e.signature
    run = partial(updated, s, Algebra(jnp, product(s.precision, False)), chunk_size(s))
    kernel = partial(run, steps=partial(_by_kernel, e))
    if e.interpret is not False:
        return kernel(operands, pool)
    return kernel_or_else(kernel, run if e.choose else None, operands, pool)


def _by_kernel(e: Execution, u: Under) -> Steps:
    p = window_plan(u.s, e.chip)
    assert p is not None
    states = _copied(u) if _READ in u.x else u.pool[RECURRENT]
    table, reached = _table(p, u)
    states, o, kept = windows(p, table, _operands(p, u), states, e.interpret)
    o = jnp.moveaxis(o, -2, 1) if p.chunked else jnp.moveaxis(o, 1, 2)
    o = jnp.reshape(o, (p.rows, p.places, -1, p.value_dim))
    checkpoints = []
    for a, there in zip(kept, reached, strict=True):
        # The last entry is what rows without a checkpoint share; where no row has one, nothing at all was written.
        checkpoints.append(jnp.where(there[:, None, None, None], a[:-1], jnp.zeros((), a.dtype)))
    return Steps(o, None, tuple(checkpoints), states)


def _copied(u: Under) -> Array:
    """The pool's states, with those of slots that are only read in the slots that their rows write."""
    rows, states = u.rows, u.pool[RECURRENT]
    other = rows.alive & (rows.read > 0) & (rows.read != rows.write)

    def copied(states: Array) -> Array:
        return states.at[u.slots(other, rows.write)].set(states[rows.read], mode="drop")

    return lax.cond(jnp.any(other), copied, lambda states: states, states)


def _table(p: Window, u: Under) -> tuple[Array, list[Array]]:
    """The kernel's table, and for each checkpoint which rows reach it."""
    rows, number = u.rows, jnp.arange(p.rows, dtype=jnp.int32)
    last = lax.cummax(jnp.where(rows.alive, number, -1))
    slot = rows.write[jnp.where(last < 0, jnp.argmax(rows.alive), last)]
    total = rows.accepted + u.own
    committed = rows.accepted + u.own * (1 - rows.waits)
    lines = [slot, total, committed, rows.alive & (rows.read == 0), (last < 0) | (rows.alive & (total == 0))]
    reached = []
    for checkpoint in range(p.checkpoints):
        at, slots = u.checkpoints(checkpoint)
        there = (slots < u.kind.slots) & (at <= committed) & rows.alive
        reached.append(there)
        lines += [jnp.where(there, at, -1), jnp.where(there, number, p.rows)]
    assert len(lines) == CHECKPOINTS + 2 * p.checkpoints
    return jnp.concatenate([line.astype(jnp.int32) for line in lines]), reached


def _operands(p: Window, u: Under) -> WindowOperands | ChunkOperands:
    """The tokens that go step by step, as the kernel takes them."""
    if p.before is not None:
        return _mixer_operands(p, u)
    s, x = u.s, u.prepared()
    decay = jnp.exp(jnp.where(x.g < RESET, -jnp.inf, x.g))
    q, values = s.scale * x.q, x.v if x.w is None else x.w * x.v
    channels = jnp.repeat(decay, s.K // decay.shape[-1], axis=-1) if p.by_channel else None
    if p.chunked:
        return _chunk_operands(p, u, (q, x.k, values, decay if channels is None else channels, x.b))
    heads = lambda a: jnp.repeat(a, s.HV // s.H, axis=2)  # noqa: E731

    def blocks(*parts: Array) -> Array:
        """[N, P, heads, ...] each as [N, blocks, P, heads of all parts in a block, ...]."""
        cut = [jnp.reshape(a, (*a.shape[:2], p.blocks, a.shape[2] // p.blocks, *a.shape[3:])) for a in parts]
        return jnp.moveaxis(jnp.concatenate(cut, 3), 2, 1)

    factors = [heads(jnp.sum(q * x.k, -1))]
    if channels is not None:
        erase = jnp.zeros_like(channels) if x.b is None else channels * (x.b * heads(x.k))
        channels = blocks(channels, erase, channels * heads(q))
    else:
        factors += [decay[..., 0], *([] if x.b is None else [(decay * x.b)[..., 0]])]
    return WindowOperands(blocks(x.k, q), blocks(values), blocks(*factors), channels)


def _chunk_operands(p: Window, u: Under, x: tuple[Array, Array, Array, Array, Array | None]) -> ChunkOperands:
    """Scale q, k, w v, decay factors and b, [N, places, heads, n] each, as a chunk takes them: by head, then token."""
    q, k, values, decay, b = x
    more = p.places - u.places

    def places(a: Array, fill: float = 0.0) -> Array:
        """[N, places, ...] with as many places as a chunk has."""
        return jnp.pad(a, ((0, 0), (0, more), *((0, 0),) * (a.ndim - 2)), constant_values=fill)

    k, values, decay = places(k), places(values), places(decay, 1.0)
    by_head = [] if b is None or p.erases_channels else [places(b)]
    channels = None
    if p.by_channel:
        erasing = [] if b is None or by_head else [places(b) * jnp.repeat(k, u.s.HV // u.s.H, axis=2)]
        channels = _blocks(p, decay, *erasing)
    else:
        by_head = [decay, *by_head]
    gates = _lanes(p, *by_head) if by_head else None
    return ChunkOperands(_blocks(p, k, places(q)), _blocks(p, values), gates, channels)


def _mixer_operands(p: Window, u: Under) -> ChunkOperands:
    """Inputs of the convolution and gates, as a chunk takes them that has the convolution inside."""
    s, before = u.s, p.before
    assert before is not None
    assert u.past is not None
    g, b, _ = u.gates(p.places)
    decay = jnp.ones((p.rows, p.places, s.HV, 1)) if g is None else jnp.exp(jnp.where(g < RESET, -jnp.inf, g))
    place = jnp.broadcast_to(jnp.arange(p.places, dtype=jnp.int32), (p.rows, p.places))
    dtype = u.pool[CONV].dtype  # that of qkv, or float32
    history = jnp.pad(u.past.astype(dtype), ((0, 0), (HISTORY - before.width + 1, 0), (0, 0)))
    inputs = jnp.concatenate([history, u.at("qkv", place).astype(dtype)], 1)
    weight = jnp.reshape(u.x["conv_weight"].astype(jnp.float32), (-1, before.width)).T
    bias = u.x["conv_bias"].astype(jnp.float32)[None] if "conv_bias" in u.x else jnp.zeros_like(weight[:1])
    taps = jnp.concatenate([weight, bias], 0)
    taps = jnp.pad(taps, ((0, TAPS - len(taps)), (0, 0)))[None]

    def heads(a: Array) -> tuple[Array, Array, Array]:
        """[.., channels] as q, k and v [.., heads, n]."""
        keys = s.H * s.K
        cut = (a[..., :keys], a[..., keys : 2 * keys], a[..., 2 * keys :])
        q, k, v = (jnp.reshape(x, (*x.shape[:2], -1, n)) for x, n in zip(cut, (s.K, s.K, s.V), strict=True))
        return q, k, v

    q, k, v = heads(inputs)
    q_taps, k_taps, v_taps = heads(taps)
    gates = _lanes(p, decay, *([] if b is None else [b]))
    own = (_blocks(p, k_taps, q_taps), _blocks(p, v_taps))
    return ChunkOperands(_blocks(p, k, q), _blocks(p, v), gates, None, *own)


def _blocks(p: Window, *parts: Array) -> Array:
    """[N, P, heads, n] each as [N, blocks, heads of a block, P of the first, P of the next, ..., n]."""
    cut = [jnp.reshape(a, (*a.shape[:2], p.blocks, -1, a.shape[-1])) for a in parts]
    return jnp.concatenate([jnp.transpose(a, (0, 2, 3, 1, 4)) for a in cut], 3)


def _lanes(p: Window, *parts: Array) -> Array:
    """[N, P, heads, 1] each as [N, blocks, P, heads of a block of all parts]."""
    cut = [jnp.reshape(a, (*a.shape[:2], p.blocks, -1)) for a in parts]
    return jnp.moveaxis(jnp.concatenate(cut, 3), 2, 1)
