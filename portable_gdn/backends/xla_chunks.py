"""The xla backend's computation: one scan over chunks, with its own gradient.

A chunk is a window of C tokens in the caller's own layout, read and written in place: no whole operand is transposed,
padded or gathered. A table gives for each chunk the start of its window, the tokens that count and the state that it
continues, so that one scan computes both plain batches and packed sequences, whose boundaries may be known only to the
device. Tokens of a window that do not count are zeros, which change nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..spec import chunkwise, jax_arrays
from ..spec import jax_isolation as isolation
from ..spec.chunkwise import ChunkOperands
from ..spec.jax_tracing import own_settings, varying, varying_like
from ..spec.precision import DEFAULT
from ..spec.probe import probe as spec_probe
from ..spec.problem import Problem, Result, Signature
from ..spec.prologue import Prepared, finish, prepare, swap_state
from ..spec.recurrent import one_token, weighted_sum
from ..spec.sequences import count_at_most
from ..spec.stages import Algebra

__all__ = ["Windows", "compute", "compute_gradients", "compute_with_states", "longer", "probe", "product"]

Array = Any


@partial(jax.jit, static_argnums=(0, 1), static_argnames="emulate")
@own_settings
def compute(
    s: Signature, size: int, operands: dict[str, Array], emulate: bool = False
) -> tuple[Array, Array | None, Array | None]:
    """Compute o, state and convolution state of a call in chunks of ``size`` tokens; see ``product`` for ``emulate``.

    A state that the call does not return is None.
    """
    return _run(s, size, operands, emulate)[0]


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="emulate")
@own_settings
def compute_with_states(
    s: Signature, size: int, every: int, operands: dict[str, Array], emulate: bool = False
) -> tuple[tuple[Array, Array | None, Array | None], Array]:
    """Return the results of ``compute``, and the states [B, T // every, ...] after every ``every`` tokens.

    The states of packed sequences follow one another, and zeros fill the remaining places.
    """
    return _run(s, size, operands, emulate, every)


@partial(jax.jit, static_argnums=(0, 1), static_argnames="emulate")
@own_settings
def compute_gradients(
    s: Signature, size: int, operands: dict[str, Array], cotangents: dict[str, Array], emulate: bool = False
) -> Any:
    """Return the results of ``compute``, and the cotangents of the float operands from those of "o" and "state"."""
    run = lambda problem: Result(*_run(s, size, problem.operands, emulate)[0])  # noqa: E731
    result, found = jax_arrays.gradients(run, Problem(s, operands), cotangents)
    return tuple(result), found


@own_settings
def probe(s: Signature, size: int, operands: dict[str, Array], emulate: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return the stages that ``compute`` goes through, chunk by chunk, with each chunk one compiled program."""
    algebra = Algebra(jnp, product(s.precision, emulate))

    @jax.jit
    def chunk(x: ChunkOperands) -> Any:
        return chunkwise.stage_chunk(algebra, x, s.scale, direct=True)

    return spec_probe(algebra, s, operands, size, chunk)


def _run(
    s: Signature, size: int, operands: dict[str, Any], emulate: bool, every: int | None = None
) -> tuple[tuple[Any, Any, Any], Any]:
    operands = varying(operands)
    p = prepare(jnp, s, operands)
    S = varying_like(jnp.zeros((s.N, s.HV, s.K, s.V), jnp.float32), p.v) if p.S is None else p.S
    states = None
    if s.step:
        o, state = _step(s, p, S)
    else:
        table = _table(s, size, operands.get("cu_seqlens"), every)
        x = ChunkOperands.of(p[:6], S, p.starts)
        o, state, states = _rule(_Program(s, size, emulate, every), x, table)
    if states is not None:  # [T // every, B, ..], or [T // every, 1, ..] for packed sequences
        states = swap_state(jnp, s, jnp.swapaxes(states, 0, 1))
    state = swap_state(jnp, s, state) if s.output_final_state else None
    return (finish(jnp, s, operands, o), state, p.conv_state), states


def _step(s: Signature, p: Prepared, S: Array) -> tuple[Array, Array]:
    rows = [None if a is None else jnp.reshape(a[:, 0], (s.B, s.H, a.shape[2] // s.H, a.shape[3])) for a in p[:6]]
    S5 = jnp.reshape(S, (s.B, s.H, s.HV // s.H, s.K, s.V))
    contract = _contract_few if not s.symbolic and s.B <= 2 else weighted_sum
    o, state = one_token(jnp, ChunkOperands.of(rows, S5), s.scale, contract)
    return jnp.reshape(o, (s.B, s.HV, s.V)), jnp.reshape(state, S.shape)


def _contract_few(xp: Any, rows: Array, S: Array) -> Array:
    """Compute S^T row; for few rows, XLA on a CPU is several times slower at the elementwise sum than at a product."""
    return lax.platform_dependent(rows, S, cpu=_batched, default=partial(weighted_sum, jnp))


def _batched(rows: Array, S: Array) -> Array:
    """Compute S^T row as one batch of products, in float32."""
    rows = jnp.broadcast_to(rows, S.shape[:-1])
    flat = jnp.matmul(
        jnp.reshape(rows, (-1, 1, S.shape[-2])), jnp.reshape(S, (-1, *S.shape[-2:])), precision=lax.Precision.HIGHEST
    )
    return jnp.reshape(flat, (*S.shape[:-2], S.shape[-1]))


def _table(s: Signature, size: int, cu_seqlens: Any, every: int | None) -> Any:
    """Return the table of chunks, int32 [chunks, 4].

    The columns are the first token that counts, the end of those that do, the state, and the place among the
    intermediate states that are returned (``T // every`` for a chunk that does not end at a multiple of ``every``).
    """
    if cu_seqlens is None and s.symbolic:
        first = jnp.arange((s.T + size - 1) // size, dtype=jnp.int32) * size
        rest = jnp.zeros_like(first)
        return jnp.stack([first, jnp.minimum(first + size, s.T), rest, rest], 1)
    block = s.T if every is None else every  # chunks do not cross its multiples
    in_block = -(-block // size)
    xp: Any = np if cu_seqlens is None else jnp
    # The values of boundaries may be known only to the device, so the table has the largest possible length, and
    # indices are bounded by T.
    bounds = np.array([0, s.T]) if cu_seqlens is None else jnp.clip(jnp.asarray(cu_seqlens).astype(jnp.int32), 0, s.T)
    length = xp.maximum(bounds[1:] - bounds[:-1], 0)
    blocks = length // block
    chunks = blocks * in_block - (-(length % block) // size)
    ends = xp.cumulative_sum(chunks)
    most = ends[-1] if cu_seqlens is None else s.T // size + s.N
    if every is not None and cu_seqlens is not None:
        most = s.T // every * in_block + min(s.N * in_block, most)
    index = xp.arange(most, dtype=xp.int32)
    sequence = xp.clip(count_at_most(xp, ends, index), 0, bounds.shape[0] - 2)
    place = index - (ends - chunks)[sequence]
    number = place // in_block
    stop = bounds[sequence] + (number + 1) * block
    first = stop - block + place % in_block * size
    end = xp.minimum(first + size, xp.minimum(stop, bounds[sequence + 1]))
    unused = index >= ends[-1]
    kept = xp.where(unused | (end != stop), s.T // block, (xp.cumulative_sum(blocks) - blocks)[sequence] + number)
    table = xp.stack([xp.where(unused, 0, first), xp.where(unused, 0, end), sequence, kept], 1)
    return jnp.asarray(table.astype(xp.int32))


def product(precision: str, emulate: bool) -> Any:
    """Return the matrix product for a precision: lax's HIGHEST, HIGH (three passes) or DEFAULT (one pass).

    A CPU computes all of them in float32. With ``emulate``, operands are rounded as a TPU's matrix unit rounds them at
    that level, which gives a TPU's sums except for their order.
    """
    levels = jax.lax.Precision
    inputs = [name for name, kept in DEFAULT.items() if kept == "bfloat16"]

    def rounded_product(a: Any, b: Any, name_a: str, name_b: str) -> Any:
        if precision == "highest":
            level = levels.HIGHEST
        elif precision == "fast" or (name_a in inputs and name_b in inputs):
            level = levels.DEFAULT
        else:
            level = levels.HIGH
        return emulated(a, b, level) if emulate else jnp.matmul(a, b, precision=level)

    def emulated(a: Any, b: Any, level: Any) -> Any:
        multiply = partial(jnp.matmul, precision=levels.HIGHEST)
        if level == levels.HIGHEST:
            return multiply(a, b)
        # A cast to bfloat16 and back would not do: XLA removes it.
        rounded = partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
        high = [rounded(a), rounded(b)]
        if level == levels.DEFAULT:
            return multiply(*high)
        low = [rounded(a - high[0]), rounded(b - high[1])]
        return multiply(high[0], low[1]) + multiply(low[0], high[1]) + multiply(*high)

    return rounded_product


class Windows:
    """A reader and writer of the windows of one chunk: rows of [B, T, heads, D] as [B, H, R, C, D], and back."""

    def __init__(self, s: Signature, entry: Any, size: int, length: int) -> None:
        self.s, self.size = s, size
        first, end, self.slot, self.kept = entry
        self.used = first < end
        self.begin = jnp.clip(first, 0, length - size)
        token = self.begin + jnp.arange(size, dtype=jnp.int32)
        self.counts = (token >= first) & (token < end)

    def _slice(self, x: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, self.begin, self.size, axis=1)

    def read(self, x: Any) -> Any:
        if x is None:
            return None
        rows = self._slice(x)
        rows = jnp.where(self.counts[:, None, None], rows, jnp.zeros((), x.dtype))
        group = x.shape[2] // self.s.H
        return jnp.reshape(jnp.moveaxis(rows, 1, 2), (x.shape[0], self.s.H, group, self.size, x.shape[3]))

    def write(self, x: Any, rows: Any) -> Any:
        if x is None:
            return None
        rows = jnp.reshape(rows, (x.shape[0], x.shape[2], self.size, x.shape[3]))
        rows = jnp.where(self.counts[:, None, None], jnp.moveaxis(rows, 1, 2), self._slice(x))
        return lax.dynamic_update_slice_in_dim(x, rows, self.begin, axis=1)

    def take(self, S: Any) -> Any:
        """Return the state that the chunk continues, [B, H, R, K, V]."""
        return lax.dynamic_slice_in_dim(S, self.slot, 1, axis=0) if self.s.packed else S

    def put(self, S: Any, new: Any) -> Any:
        if not self.s.packed:
            return new
        new = jnp.where(self.used, new, self.take(S))  # unused chunks must not even turn -0.0 into 0.0
        return lax.dynamic_update_slice_in_dim(S, new, self.slot, axis=0)


class _Program(NamedTuple):
    """The constants on which the rule's compiled program depends, in addition to the shapes of its operands."""

    s: Signature
    size: int  # tokens per chunk
    emulate: bool  # see product
    every: int | None  # if given, the states after every so many tokens are also results

    @property
    def algebra(self) -> Algebra:
        return Algebra(jnp, product(self.s.precision, self.emulate))


def _forward(program: _Program, x: ChunkOperands, table: Array, keep: bool) -> tuple[Array, Array, Array | None, Any]:
    s, algebra = program.s, program.algebra
    x, length = _at_least(x, program.size)
    S = jnp.reshape(x.S, (s.N, s.H, s.HV // s.H, s.K, s.V))

    def step(carry: Any, entry: Any) -> Any:
        o, S, states = carry
        window = Windows(s, entry, program.size, length)
        part = _chunk(window, x, window.take(S))
        out, after, saved = chunkwise.forward_chunk(algebra, part, s.scale)
        if states is not None:
            states = lax.dynamic_update_index_in_dim(states, after, window.kept, 0)
        return (window.write(o, out), window.put(S, after), states), ((saved, part.S) if keep else None)

    o = varying_like(jnp.zeros((s.B, length, s.HV, s.V), jnp.float32), S)
    states = None  # or the intermediate states, followed by one that is not read
    if program.every is not None:
        states = varying_like(jnp.zeros((s.T // program.every + 1, s.B, *S.shape[1:]), jnp.float32), S)
    (o, S, states), saved = lax.scan(step, (o, S, states), tuple(table.T))
    if states is not None:
        states = jnp.reshape(states[:-1], (-1, s.B, s.HV, s.K, s.V))
    return o[:, : s.T], jnp.reshape(S, (s.N, s.HV, s.K, s.V)), states, saved


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@own_settings
def _rule(program: _Program, x: ChunkOperands, table: Array) -> tuple[Array, Array, Array | None]:
    """Compute the bare rule.

    Args:
        program: the constants of the program.
        x: the operands of all tokens, [B, T, heads, ...], with ``starts`` [B, T].
        table: see ``_table``.

    Returns:
        o [B, T, HV, V], the final states [N, HV, K, V], and the states [T // every, B, HV, K, V] after every so many
        tokens, or None.
    """
    return _rule_forward(program, x, table, keep=False)[0]


@own_settings
def _rule_forward(program: _Program, x: ChunkOperands, table: Array, keep: bool = True) -> Any:
    reached = None
    if x.starts is not None:
        rows, S, reached = isolation.clean(x.rows, x.S, x.starts)
        x = ChunkOperands.of(rows, S, x.starts)
    o, S, states, saved = _forward(program, x, table, keep)
    if reached is not None:
        o, S = isolation.mark(o, S, reached)
    return (o, S, states), (x, reached, table, saved)


@own_settings
def _rule_backward(program: _Program, kept: Any, cotangents: tuple[Array, Array, Array | None]) -> Any:
    s, algebra = program.s, program.algebra
    x, reached, table, saved = kept
    dO, dS, d_states = cotangents
    affected = None
    if reached is not None:
        dO, dS, affected = isolation.clean_cotangents(dO, dS, x.starts, reached)
    x, length = _at_least(x, program.size)
    dO = longer(dO, length)
    by_group = (s.H, s.HV // s.H, s.K, s.V)
    dS = jnp.reshape(dS, (s.N, *by_group))
    if d_states is not None:  # zeros for chunks that returned no state
        d_states = jnp.reshape(jnp.pad(d_states, ((0, 1), *[(0, 0)] * 4)), (-1, s.B, *by_group))

    def step(carry: Any, item: Any) -> Any:
        grads, dS = carry
        entry, (saved, before) = item
        window = Windows(s, entry, program.size, length)
        after = window.take(dS)
        if d_states is not None:
            after = after + lax.dynamic_index_in_dim(d_states, window.kept, 0, keepdims=False)
        d = chunkwise.backward_chunk(algebra, _chunk(window, x, before), s.scale, saved, window.read(dO), after)
        q, k, *rest = d[:6]
        new = (jnp.sum(q, 2, keepdims=True), jnp.sum(k, 2, keepdims=True), *rest)
        return (tuple(map(window.write, grads, new)), window.put(dS, d.S)), None

    zeros = varying_like(tuple(None if a is None else jnp.zeros_like(a) for a in x.rows), dS)
    (grads, dS), _ = lax.scan(step, (zeros, dS), (tuple(table.T), saved), reverse=True)
    grads = [None if a is None else a[:, : s.T] for a in grads]
    dS = jnp.reshape(dS, (s.N, s.HV, s.K, s.V))
    if affected is not None:
        grads, dS = isolation.mark_gradients(grads, dS, affected)
    return ChunkOperands.of(grads, dS), None


_rule.defvjp(_rule_forward, _rule_backward)


def _at_least(x: ChunkOperands, size: int) -> tuple[ChunkOperands, int]:
    """Pad operands to at least one chunk of tokens, and return them with the number of tokens.

    A symbolic number of tokens is padded by one chunk.
    """
    length = x.q.shape[1]
    if not isinstance(length, int):
        length = length + size
    elif length >= size:
        return x, length
    else:
        length = size
    *rows, starts = (None if a is None else longer(a, length) for a in (*x.rows, x.starts))
    return ChunkOperands.of(rows, x.S, starts), length


def longer(a: Array, length: int) -> Array:
    """Pad [B, T, ...] with zeros to ``length`` tokens."""
    more = length - a.shape[1]
    return a if isinstance(more, int) and more == 0 else jnp.pad(a, [(0, 0), (0, more)] + [(0, 0)] * (a.ndim - 2))


def _chunk(window: Windows, x: ChunkOperands, S: Array) -> ChunkOperands:
    """Return the operands of the window's tokens, with the state at its start and ``starts`` as [B, 1, 1, C, 1]."""
    starts = None
    if x.starts is not None:
        starts = (window._slice(x.starts) & window.counts)[:, None, None, :, None]
    return ChunkOperands.of(map(window.read, x.rows), S, starts)
