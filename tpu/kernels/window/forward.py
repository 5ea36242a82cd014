"""The window kernel: a row's tokens one by one or as a chunk, on states that lie in the pool's slots and stay there.

Which slot a grid step gets is read from scalar memory, and the pool is an operand and a result of one memory, so that
nothing else of it is moved. A row that is nothing is given the block of the row before it, which Mosaic then neither
fetches nor sends anew.

A token of a value head, with S in VMEM and the columns k and q along the sublanes:

    u = w v - c S^T k;   o = d S^T q + (q.k) u;   S <- d S + k u^T        c = d b, q scaled

Both products with S are sums over sublanes in float32, elementwise: nothing is rounded to bfloat16 and no product unit
loads a state that it would use for two rows. S is read twice and written once. With gates by channel d, d b k and d q
are columns, too. All tokens of a call go through the same code, so that bits do not depend on how they were split.
``chunk.py`` has the other way, for windows whose bits may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..common.launching import Block, Launch, launch
from ..common.registers import F32
from .chunk import Chunk, ChunkOperands
from .plan import Window

__all__ = ["CHECKPOINTS", "COMMITTED", "COPIED", "FRESH", "SLOT", "TOTAL", "WindowOperands", "windows"]

Array = Any
Ref = Any

#: Parts of the table in scalar memory, N entries each, one behind the other (rows of two dimensions would be filled up
#: to 128): the slot; tokens, and how many of them are committed; whether states start from zeros; whether they are only
#: handed through (those of rows without a token here, and of rows that are nothing before the first that is something).
#: Behind them two parts a checkpoint: after how many tokens it is, and where it goes.
SLOT, TOTAL, COMMITTED, FRESH, COPIED, CHECKPOINTS = range(6)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowOperands:
    """Float32 operands by blocks of heads, [N, blocks, P, ...].

    Attributes:
        keys: [.., 2 h, K], the rows k and scale q of h key heads.
        values: [.., r h, V], w v.
        factors: [.., m], in scalar memory: of each value head q.k (with scale), then d, then c, as far as they are one
            value a head.
        channels: [.., 3 r h, K], the rows d, d b k and scale d q of the value heads, or None.
    """

    keys: Any
    values: Any
    factors: Any
    channels: Any = None


def windows(
    p: Window, table: Array, x: WindowOperands | ChunkOperands, pool: Array, interpret: Any
) -> tuple[Array, Array, tuple[Array, ...]]:
    """The pool with what rows commit, o [N, blocks, P, r h, V] (or, of a chunk, [N, blocks, r h, P, V]), and states at
    checkpoints [N + 1, HV, K, V] each.

    Args:
        table: int32 [parts * N], see ``SLOT``. pool: [S, HV, K, V], whose memory the result takes.
    """
    state = (1, p.value_heads, p.key_dim, p.value_dim)
    slots = pl.BlockSpec(state, lambda h, n, table: (table[SLOT * p.rows + n], h, 0, 0))
    block = lambda a, space=None: Block(a, _tokens(a, space))  # noqa: E731
    operands: WindowOperands | ChunkOperands
    if isinstance(x, ChunkOperands):
        with_tokens = [None if a is None else block(a) for a in (x.keys, x.values, x.gates, x.channels)]
        taps = [None if a is None else Block(a, _taps(a)) for a in (x.key_taps, x.value_taps)]
        operands = ChunkOperands(*with_tokens, *taps)
    else:
        channels = None if x.channels is None else block(x.channels)
        operands = WindowOperands(block(x.keys), block(x.values), block(x.factors, pltpu.SMEM), channels)
    shape = (p.value_heads, p.places) if p.chunked else (p.places, p.value_heads)
    o = jax.ShapeDtypeStruct((p.rows, p.blocks, *shape, p.value_dim), F32)
    held = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    kept = jax.ShapeDtypeStruct((p.rows + 1, *pool.shape[1:]), pool.dtype)
    results = (
        Block(held, slots),
        Block(o, _tokens(o)),
        tuple(Block(kept, pl.BlockSpec(state, _checkpoint(p, number))) for number in range(p.checkpoints)),
    )
    if p.chunked:
        own = pltpu.VMEM((*shape, p.value_dim), F32)
        work = [own] if p.checkpoints else []
        if p.before is not None:
            work += [pltpu.VMEM((p.key_heads, 2 * p.places, p.key_dim), F32), own]
    else:
        work = [pltpu.VMEM(state[1:], F32)] if p.places > 1 else []
    leaves = len(jax.tree.leaves(operands))
    how = Launch("window", (p.blocks, p.rows), p.vmem, interpret, ((leaves, 0),))
    return launch(lambda *refs: _kernel(p, *refs), how, table, (operands, Block(pool, slots)), results, work)


def _tokens(a: Any, space: Any = None) -> pl.BlockSpec:
    """A row's tokens of a block of heads."""
    rest = (0,) * (len(a.shape) - 2)
    where = {} if space is None else {"memory_space": space}
    return pl.BlockSpec((1, 1, *a.shape[2:]), lambda h, n, table: (n, h, *rest), **where)


def _taps(a: Any) -> pl.BlockSpec:
    """The taps of a block of heads, the same for all rows."""
    rest = (0,) * (len(a.shape) - 2)
    return pl.BlockSpec((1, 1, *a.shape[2:]), lambda h, n, table: (0, h, *rest))


def _checkpoint(p: Window, number: int) -> Any:
    """Where the states at a checkpoint go: a row that reaches none shares a block that nobody reads."""
    return lambda h, n, table: (table[(CHECKPOINTS + 2 * number + 1) * p.rows + n], h, 0, 0)


def _kernel(p: Window, table: Ref, operands: Any, results: Any, scratch: Any) -> None:
    x, pool = operands
    out, o, kept = results
    n = pl.program_id(1)
    total, committed, fresh = (table[row * p.rows + n] for row in (TOTAL, COMMITTED, FRESH))
    places = [table[(CHECKPOINTS + 2 * number) * p.rows + n] for number in range(p.checkpoints)]

    def first(h: Any) -> Array:
        return jnp.where(fresh > 0, jnp.zeros((), F32), pool[0, h].astype(F32))

    @pl.when(table[COPIED * p.rows + n] > 0)
    def _() -> None:
        _each_head(p, lambda h: _store(out, h, first(h)))

    if p.chunked:

        @pl.when(total > 0)
        def _() -> None:
            us, room = scratch[: bool(p.checkpoints)], scratch[bool(p.checkpoints) :]
            own = Chunk(p, x, lambda h: jnp.where(fresh > 0, jnp.zeros((), pool.dtype), pool[0, h]), room or None)
            own.run(committed, lambda h, S: _store(out, h, S), o, *us or [None])
            for into, place in zip(kept, places, strict=True):

                @pl.when(place > 0)
                def _(into: Ref = into, place: Any = place) -> None:
                    own.commit(place, lambda h, S: _store(into, h, S), *us)

        return

    @pl.when(total > 0)
    def _() -> None:
        if not scratch:
            _token(p, x, 0, first, lambda h, S: _store(out, h, S), o)
            _keep(p, kept, places, 1, lambda h: out[0, h].astype(F32))
            return
        (work,) = scratch
        held = lambda h: work[h]  # noqa: E731

        @pl.when(committed == 0)
        def _() -> None:
            _each_head(p, lambda h: _store(out, h, first(h)))

        def begin(h: Any) -> None:
            work[h] = first(h)

        _each_head(p, begin)

        def turn(number: Any, _: Any) -> None:
            _token(p, x, number, held, work.__setitem__, o)
            _keep(p, kept, places, number + 1, held)

            @pl.when(number + 1 == committed)
            def _() -> None:
                _each_head(p, lambda h: _store(out, h, held(h)))

        jax.lax.fori_loop(0, total, turn, None)


def _store(out: Ref, h: Any, S: Array) -> None:
    out[0, h] = S.astype(out.dtype)


def _each_head(p: Window, do: Any) -> None:
    """A loop over value heads, for what is only copied."""
    jax.lax.fori_loop(0, p.value_heads, lambda h, _: do(h), None)


def _keep(p: Window, kept: tuple[Ref, ...], places: list[Any], count: Any, held: Any) -> None:
    """The states where ``count`` tokens are done, if a checkpoint is there."""
    for into, place in zip(kept, places, strict=True):

        @pl.when(place == count)
        def _(into: Ref = into) -> None:
            _each_head(p, lambda h: _store(into, h, held(h)))


def _token(p: Window, x: WindowOperands, number: Any, load: Any, store: Any, o: Ref) -> None:
    """One token of all heads; ``load(h)`` is the state before it, ``store(h, S)`` takes the one after it."""
    heads, group = p.key_heads, p.group
    columns = jnp.transpose(x.keys[0, 0, number])
    fine = None if x.channels is None else jnp.transpose(x.channels[0, 0, number])
    whole = lambda a, i: jnp.broadcast_to(a[:, i : i + 1], (p.key_dim, p.value_dim))  # noqa: E731
    factor = lambda row, h: x.factors[0, 0, number, row * p.value_heads + h]  # noqa: E731
    for key in range(heads):
        k = whole(columns, key)
        q = whole(columns, heads + key) if fine is None else None
        for h in range(key * group, (key + 1) * group):
            S = load(h)
            if fine is None:
                d = factor(1, h)
                read, decayed = d * _summed(q, S), d * S
                erased = factor(2, h) * _summed(k, S) if p.erases else None
            else:
                decayed = whole(fine, h) * S
                read = _summed(whole(fine, 2 * p.value_heads + h), S)
                erased = _summed(whole(fine, p.value_heads + h), S) if p.erases else None
            u = x.values[0, 0, number, h : h + 1]
            u = u if erased is None else u - erased
            o[0, 0, number, h : h + 1] = read + factor(0, h) * u
            store(h, decayed + k * u)


def _summed(column: Array, S: Array) -> Array:
    """S^T column, [1, V]."""
    return jnp.sum(column * S, axis=0, keepdims=True)
