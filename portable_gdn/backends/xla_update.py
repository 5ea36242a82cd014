"""An update of a pool of states by XLA: one compiled program for all batches of some shapes.

Tokens that wait or have waited, and single tokens, are computed step by step for all rows at once: from the states in
each row's slot, first the accepted ones of its waiting tokens and then its own, in one loop that runs one program in
every iteration. A window, its tokens one at a time, and the tokens computed again after a rejection therefore agree bit
for bit. Longer rows are computed chunk by chunk, and each reads and writes its slot in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..spec import chunkwise
from ..spec.chunkwise import ChunkOperands
from ..spec.jax_tracing import own_settings, varying, varying_like
from ..spec.operands import BATCH_OPERANDS, GATES, OPERANDS, PER_TOKEN, WITH_TOKENS
from ..spec.problem import Signature
from ..spec.prologue import gates, normed, prepare, swap_state
from ..spec.recurrent import one_token
from ..spec.slots import (
    CONV,
    PENDING,
    RECURRENT,
    Rows,
    call_of,
    crossed,
    most_crossed,
    rows_of,
    token_rows,
    waiting,
    window_name,
)
from ..spec.stages import Algebra
from .xla_chunks import Windows, longer, product

__all__ = ["Steps", "Under", "step_by_step", "update", "updated"]

#: Operands with tokens from which the rule is computed; the others act on its output.
BEFORE_THE_RULE = tuple(name for name in PER_TOKEN if not OPERANDS[name].output)

Array = Any
Arrays = dict[str, Array]


@partial(jax.jit, static_argnums=(0, 1), static_argnames="emulate", donate_argnums=(3,))
@own_settings
def update(s: Signature, size: int, operands: Arrays, pool: Arrays, emulate: bool = False) -> tuple[Array, Arrays]:
    """Compute an update, and return its outputs and the new pool, which takes over the memory of the given one.

    Args:
        s: the update.
        size: the number of tokens per chunk.
        operands: the operands without those of the pool.
        pool: the operands of the pool.
        emulate: whether to round products as on a TPU.
    """
    return updated(s, Algebra(jnp, product(s.precision, emulate)), size, operands, pool)


def updated(
    s: Signature,
    algebra: Algebra,
    size: int,
    operands: Arrays,
    pool: Arrays,
    steps: Callable[[Under], Steps] | None = None,
) -> tuple[Array, Arrays]:
    """Compute what ``update`` returns, inside a trace; ``steps`` replaces XLA's way of computing step by step."""
    held = varying({**operands, **pool})
    u = Under(s, {name: held[name] for name in operands}, {name: held[name] for name in pool})
    done = step_by_step(u, u.states()) if steps is None else steps(u)
    pool = u.written(done)
    o = u.outputs(done.o)
    if u.most < s.T:
        long = (u.rows.length > u.most) & u.rows.alive
        run = partial(_chunks, u, algebra, size, long)
        pool[RECURRENT], o = lax.cond(jnp.any(long), run, lambda states, o: (states, o), pool[RECURRENT], o)
    if s.norm is not None:  # padding is normed, too, and its gates may be anything
        o = normed(jnp, s, held, o)
        o = jnp.where(token_rows(jnp, s, u.rows, o)[1][:, None, None], o, 0.0)
    return o.astype(s.dtype), pool


class Steps(NamedTuple):
    """The results of the steps.

    They are o [N, P, HV, V]; the states to commit [N, HV, K, V], or None; the states at checkpoints, one array for each
    multiple that a row's steps can reach; and the pool's states if they are already committed.
    """

    o: Array
    states: Array | None
    checkpoints: tuple[Array, ...]
    pool: Array | None = None


class Under:
    """An update in progress: its rows, and the tokens of each that are computed step by step, [N, P, ...].

    ``most`` is the largest number of a row's own tokens that are computed step by step. ``places`` is P, the number of
    these and the waiting tokens together.
    """

    def __init__(self, s: Signature, x: Arrays, pool: Arrays) -> None:
        assert s.update is not None
        self.kind = s.update
        if s.conv is not None and not s.conv.fused:
            x = {**x, "qkv": jnp.concatenate([x[name] for name in "qkv"], -1)}
            x = {name: a for name, a in x.items() if name not in tuple("qkv")}
            s = _replaced(s, x)
        self.s, self.x, self.pool = s, x, pool
        facts = {name: jnp.asarray(x[name]) for name in BATCH_OPERANDS if name in x}
        self.rows: Rows = rows_of(jnp, s, {**facts, **pool})
        self.most = min(max(self.kind.window, 1), s.T)
        self.places = self.kind.room + self.most
        self.own = jnp.where(self.rows.length <= self.most, self.rows.length, 0)
        self.held = {name: pool[window_name(name)][self.rows.read] for name in waiting(s) if self.kind.room}
        self.past = self._of_rows(CONV) if s.conv is not None else None

    def _of_rows(self, name: str) -> Array:
        """Return the contents of the rows' slots in float32, and zeros for rows that read none."""
        found = self.pool[name][self.rows.read].astype(jnp.float32)
        there = jnp.reshape(self.rows.read > 0, (-1, *(1,) * (found.ndim - 1)))
        return jnp.where(there, found, 0.0)

    def states(self) -> Array:
        """Return the states from which the rows start, [N, HV, K, V]."""
        return swap_state(jnp, self.s, self._of_rows(RECURRENT))

    def at(self, name: str, place: Array) -> Array:
        """Return an operand's tokens at places [N, P] of each row: the accepted ones, then its own, then zeros."""
        rows, own = self.rows, self.x[name]
        if name in GATES:
            own = own.astype(jnp.float32)
        token = rows.begin[:, None] + place - rows.accepted[:, None]
        found = own[jnp.clip(token, 0, self.s.T - 1)]
        wide = lambda flags: jnp.reshape(flags, (*flags.shape, *(1,) * (found.ndim - 2)))  # noqa: E731
        again = place < rows.accepted[:, None]
        zero = jnp.zeros((), found.dtype)
        found = jnp.where(wide(~again & (place < (rows.accepted + rows.length)[:, None]) & (place >= 0)), found, zero)
        if name not in self.held:  # q of the bare rule: waiting tokens had their output already
            return found
        old = jnp.take_along_axis(self.held[name], wide(jnp.clip(place, 0, self.kind.room - 1)), axis=1)
        old = jnp.reshape(old, found.shape).astype(found.dtype)
        return jnp.where(wide(again & (place >= 0)), old, found)

    def inputs_after(self, count: Array) -> Array:
        """Return the convolution's last inputs [N, W - 1, channels] after ``count`` [N] of the rows' tokens."""
        assert self.s.conv is not None
        assert self.past is not None
        reach = self.s.conv.width - 1
        place = count[:, None] - reach + jnp.arange(reach, dtype=jnp.int32)
        before = jnp.take_along_axis(self.past, jnp.clip(place + reach, 0, max(reach - 1, 0))[..., None], axis=1)
        return jnp.where((place < 0)[..., None], before, self.at("qkv", place).astype(jnp.float32))

    def prepared(self) -> Any:
        """Return the tokens that are computed step by step as operands of the bare rule, [N, P, heads, ...]."""
        s = self.s
        place = jnp.broadcast_to(jnp.arange(self.places, dtype=jnp.int32), (s.N, self.places))
        x = {name: self.at(name, place) for name in self.x if name in BEFORE_THE_RULE}
        rest = {name: a for name, a in self.x.items() if name not in WITH_TOKENS and name not in BATCH_OPERANDS}
        if self.past is not None:
            rest["conv_state"] = self.past
        return prepare(jnp, _replaced(call_of(s, B=s.N, T=self.places), {**x, **rest}), {**x, **rest})

    def gates(self, places: int) -> tuple[Array | None, Array | None, Array | None]:
        """Return g, b and w of the first ``places`` places of each row, [N, places, HV, n]; see ``prologue.gates``."""
        s = self.s
        place = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), (s.N, places))
        x = {name: self.at(name, place) for name in self.x if name in GATES}
        rest = {name: a for name, a in self.x.items() if name in ("A_log", "dt_bias")}
        return gates(jnp, _replaced(call_of(s, B=s.N, T=places), {**x, **rest}), {**x, **rest})

    def outputs(self, o: Array) -> Array:
        """Return o [T, HV, V] in float32 from o [N, P, HV, V] of the steps, with zeros for all other tokens."""
        row, there = token_rows(jnp, self.s, self.rows, o)
        place = jnp.arange(self.s.T, dtype=jnp.int32) - self.rows.begin[row] + self.rows.accepted[row]
        there = there & (self.own[row] > 0)
        found = o[row, jnp.clip(place, 0, self.places - 1)]
        return jnp.where(there[:, None, None], found, 0.0)

    def slots(self, which: Array, slot: Array) -> Array:
        """Return the slots to write, [N].

        A row that writes no slot gets one after the pool's last, to which nothing is written.
        """
        return jnp.where(which & (slot > 0) & (slot < self.kind.slots), slot, self.kind.slots).astype(jnp.int32)

    def checkpoints(self, number: int) -> tuple[Array, Array]:
        """Return the number of committed tokens at each row's checkpoint ``number``, and the slot for it, or none."""
        at = crossed(self.rows, self.kind.checkpoint_every, number)
        slot = jnp.asarray(self.x["batch.checkpoint_indices"])[:, number]
        return at, self.slots(self.rows.alive & (at <= self.rows.committed), slot)

    def written(self, done: Steps) -> Arrays:
        """Return the pool with committed states, the convolution's inputs at the rows' ends, and waiting tokens."""
        s, rows, pool = self.s, self.rows, dict(self.pool)
        put = lambda name, slot, a: pool[name].at[slot].set(a.astype(pool[name].dtype), mode="drop")  # noqa: E731
        write = self.slots(rows.alive, rows.write)
        if done.pool is not None:
            pool[RECURRENT] = done.pool
        else:
            pool[RECURRENT] = put(RECURRENT, write, swap_state(jnp, s, done.states))
        if s.conv is not None:
            pool[CONV] = put(CONV, write, self.inputs_after(rows.committed))
        for number in range(min(self.kind.columns, self._most_checkpoints(s.T + self.kind.room))):
            at, slot = self.checkpoints(number)
            if number < len(done.checkpoints):
                stepped = (at <= rows.accepted + self.own) & (slot < self.kind.slots)
                states = swap_state(jnp, s, done.checkpoints[number])
                pool[RECURRENT] = put(RECURRENT, self.slots(stepped, slot), states)
            if s.conv is not None:
                pool[CONV] = put(CONV, slot, self.inputs_after(at))
            if self.kind.room:
                pool[PENDING] = put(PENDING, slot, jnp.zeros_like(slot))
        if self.kind.room:
            pool[PENDING] = put(PENDING, write, rows.length * rows.waits)
        if self.kind.window:
            place = jnp.broadcast_to(jnp.arange(self.most, dtype=jnp.int32), (s.N, self.most))
            slot = self.slots(rows.waits > 0, rows.write)  # a whole row at a time, zeros behind its tokens
            for name in waiting(s):
                into = pool[window_name(name)]
                new = self.at(name, place + rows.accepted[:, None]).astype(into.dtype)
                new = jnp.reshape(new, (*place.shape, *into.shape[2:]))
                pool[window_name(name)] = into.at[slot, : self.most].set(new, mode="drop")
        return pool

    def _most_checkpoints(self, tokens: int) -> int:
        return most_crossed(tokens, self.kind.checkpoint_every) if self.kind.columns else 0

    @property
    def checkpoints_in_steps(self) -> int:
        """The number of checkpoints that the tokens of the steps can reach and have slots for."""
        return min(self.kind.columns, self._most_checkpoints(self.places))


def _replaced(s: Signature, x: Mapping[str, Array]) -> Signature:
    """Return a signature for the operands that exist; q, k and v are one array if a convolution precedes the rule."""
    conv = None if s.conv is None else s.conv._replace(fused=True)
    return call_of(s, operands=tuple(x), conv=conv, update=s.update)


def step_by_step(u: Under, S: Array) -> Steps:
    """Compute accepted tokens, then the tokens of rows no longer than a window, for all rows at once.

    Args:
        u: the update.
        S: the states from which rows start, [N, HV, K, V].
    """
    s, rows = u.s, u.rows
    p = prepare_heads(u)
    shape = S.shape
    S = jnp.reshape(S, (s.N, s.H, s.HV // s.H, s.K, s.V))
    total = rows.accepted + u.own
    commits = rows.accepted + u.own * (1 - rows.waits)
    wide = lambda flags: jnp.reshape(flags, (-1, 1, 1, 1, 1))  # noqa: E731
    counts = [u.checkpoints(number)[0] for number in range(u.checkpoints_in_steps)]

    def turn(number: Array, carry: Any) -> Any:
        S, kept, o, checkpoints = carry
        now = [None if a is None else lax.dynamic_index_in_dim(a, number, 1, keepdims=False) for a in p]
        out, new = one_token(jnp, ChunkOperands.of(now, S), s.scale)
        o = lax.dynamic_update_index_in_dim(o, out, number, 1)
        kept = kept if kept is None else jnp.where(wide(number < commits), new, kept)
        checkpoints = tuple(
            jnp.where(wide(number + 1 == at), new, a) for at, a in zip(counts, checkpoints, strict=True)
        )
        return jnp.where(wide(number < total), new, S), kept, o, checkpoints

    o = varying_like(jnp.zeros((s.N, u.places, *S.shape[1:3], s.V), jnp.float32), S)
    carry = (S, S if u.kind.window else None, o, tuple(jnp.zeros_like(S) for _ in counts))
    if u.places == 1:
        carry = turn(jnp.zeros((), jnp.int32), carry)
    else:
        carry = lax.fori_loop(0, jnp.max(total), turn, carry)
    S, kept, o, checkpoints = carry
    states = jnp.reshape(S if kept is None else kept, shape)
    return Steps(jnp.reshape(o, (s.N, u.places, s.HV, s.V)), states, tuple(jnp.reshape(a, shape) for a in checkpoints))


def prepare_heads(u: Under) -> list[Array | None]:
    """Return q, k, v, g, b and w of the tokens that are computed step by step, by key head: [N, P, H, heads, ...]."""
    s, p = u.s, u.prepared()
    return [
        None if a is None else jnp.reshape(a, (s.N, u.places, s.H, a.shape[2] // s.H, a.shape[3]))
        for a in p[: len("qkvgbw")]
    ]


# Longer rows. ---------------------------------------------------------------------------------------------------------


def _chunks(u: Under, algebra: Algebra, size: int, long: Array, states: Array, o: Array) -> tuple[Array, Array]:
    """Compute the long rows; return the pool's states [S, ...] after them, and o [T, HV, V] with their outputs.

    Args:
        u: the update.
        algebra: the array namespace and the matrix product to use.
        size: the number of tokens per chunk.
        long: which rows are long, boolean [N].
        states: the pool's states, [S, ...].
        o: the outputs so far, [T, HV, V].
    """
    s = u.s
    x = {name: a[None] for name, a in u.x.items() if name in BEFORE_THE_RULE}
    x |= {name: a for name, a in u.x.items() if name not in WITH_TOKENS and name not in BATCH_OPERANDS}
    if s.conv is not None:
        x["conv_state"] = u.inputs_after(u.rows.accepted)
    x["cu_seqlens"] = jnp.clip(jnp.asarray(u.x["batch.query_start_loc"]), 0, s.T).astype(jnp.int32)
    call = _replaced(call_of(s), x)
    p = prepare(jnp, call, x)
    # No window is moved to fit in, because a row's bits must not depend on the place of its tokens.
    length = s.T + size
    rows = [None if a is None else longer(a, length) for a in p[: len("qkvgbw")]]
    table, used = _table(u, size, long)
    o = longer(o[None], length)

    def turn(number: Array, carry: Any) -> Any:
        states, S, o = carry
        first, end, begins, slot, kept = table[number]
        window = Windows(call, (first, end, slot, kept), size, length)
        loaded = lax.dynamic_slice_in_dim(states, slot, 1, axis=0).astype(jnp.float32)
        loaded = jnp.reshape(swap_state(jnp, s, loaded), S.shape)
        S = jnp.where(begins > 0, loaded, S)
        out, S, _ = chunkwise.forward_chunk(algebra, ChunkOperands.of(map(window.read, rows), S), s.scale)
        stored = swap_state(jnp, s, jnp.reshape(S, (1, s.HV, s.K, s.V))).astype(states.dtype)
        states = lax.dynamic_update_slice_in_dim(states, stored, slot, axis=0)
        if u.kind.columns:
            states = lax.dynamic_update_slice_in_dim(states, stored, kept, axis=0)
        return states, S, window.write(o, out)

    S = varying_like(jnp.zeros((1, s.H, s.HV // s.H, s.K, s.V), jnp.float32), states)
    states, _, o = lax.fori_loop(0, used, turn, (states, S, o))
    return states, o[0, : s.T]


def _table(u: Under, size: int, long: Array) -> tuple[Array, Array]:
    """Return the table of the chunks of long rows, int32 [chunks, 5], and their number.

    The columns are the first token, the end, whether a row begins with the chunk, its slot, and the slot for the states
    after it (its own again if they are not a checkpoint). Chunks do not cross multiples of ``checkpoint_every``, from
    which they are counted.
    """
    s, kind, rows = u.s, u.kind, u.rows
    length = jnp.where(long, rows.length, 0)
    every = kind.checkpoint_every or s.T + size  # no row has so many tokens
    in_block = -(-every // size)
    before = rows.start + rows.accepted  # the number of the request's tokens
    phase = before % every if kind.checkpoint_every else jnp.zeros_like(before)
    stop = phase + length
    chunks = stop // every * in_block - (-(stop % every) // size) - phase // size
    chunks = jnp.where(long, chunks, 0)
    ends = jnp.cumulative_sum(chunks)
    most = s.T // size + 2 * (s.T // every) + 4 * s.N + 1
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(ends, index, side="right"), 0, s.N - 1)
    place = index - (ends - chunks)[row]
    grid = (phase // size)[row] + place
    block = grid // in_block
    from_phase = block * every + grid % in_block * size
    end = jnp.minimum(jnp.minimum(from_phase + size, (block + 1) * every), stop[row])
    first = jnp.maximum(from_phase, phase[row])
    token = rows.begin[row] - phase[row]
    slot = rows.write[row]
    kept = slot
    if kind.columns:
        column = before[row] // every - rows.start[row] // every + block
        given = jnp.asarray(u.x["batch.checkpoint_indices"])[row, jnp.clip(column, 0, kind.columns - 1)]
        there = (end == (block + 1) * every) & (column < kind.columns) & (given > 0) & (given < kind.slots)
        kept = jnp.where(there, given, slot)
    table = jnp.stack([token + first, token + end, place == 0, slot, kept], 1)
    return table.astype(jnp.int32), ends[-1].astype(jnp.int32)
