"""The meaning of an update of a pool of states: the slots that a batch's rows read and write, and the tokens committed.

A pool has S slots, one per request; slot 0 is null. A batch has N rows, each with some tokens of one request. The
tokens of all rows are ragged, [T, ...]: row n has those from ``query_start_loc[n]`` up to ``query_start_loc[n + 1]``,
and the tokens after the last row are padding. Rows may come in any order, and each depends only on its own numbers:

- A row without tokens, or whose slot is 0, negative or outside the pool, is inactive: it reads nothing, writes nothing
  and returns o = 0.
- A request of which no token has been computed starts from zeros, whatever its slot contains.
- **Rollback without undoing**: the recurrent and convolution states of a slot contain accepted tokens only. The tokens
  of a row with at most ``window`` tokens are stored in its slot as they came, and wait there. The request's next row
  says how many of them, counted from the first, are accepted. These are computed again and committed; the others are
  dropped. A longer row commits the accepted tokens and all of its own.
- A row may read one slot and write another, and then leaves the first unchanged. All rows read before any row writes.
- Whenever the committed tokens reach a multiple of ``checkpoint_every``, counted from the request's first token, the
  states at that point are written to the next of the row's slots for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .checks import expect, rank, shape_of, takes
from .errors import GdnError, bad
from .operands import BATCH_OPERANDS, GATES, PER_TOKEN, POOL_OPERANDS, window_operand
from .problem import Meta, PoolKind, Signature, UpdateOptions
from .stages import Array, Namespace

__all__ = [
    "CONV",
    "PENDING",
    "RECURRENT",
    "Rows",
    "batch_conditions",
    "batch_rows",
    "call_of",
    "crossed",
    "most_crossed",
    "pool_kind",
    "rows_of",
    "token_rows",
    "waiting",
    "window_name",
]

RECURRENT, CONV, PENDING = POOL_OPERANDS
_STARTS, _WRITE, _COMPUTED, _ACCEPTED, _READ, _CHECKPOINTS = BATCH_OPERANDS


# Shapes and dtypes. ---------------------------------------------------------------------------------------------------


def batch_rows(meta: Mapping[str, Meta]) -> int:
    """Return the number of rows N of a batch, after checking that its arrays agree.

    Raises:
        GdnError: an array of the batch has a wrong shape or dtype.
    """
    for name, operand in BATCH_OPERANDS.items():
        if name in meta:
            takes(meta, operand)
    starts = rank(meta, _STARTS, "[N + 1]")
    if starts[0] < 1:
        raise bad(_STARTS, f"of shape {shape_of(starts)}", "hold N + 1 >= 1 boundaries")
    N = starts[0] - 1
    for name in BATCH_OPERANDS:
        if name in meta and name not in (_STARTS, _CHECKPOINTS):
            expect(meta, name, (N,), "[N]")
    if _CHECKPOINTS in meta:
        expect(meta, _CHECKPOINTS, (N, rank(meta, _CHECKPOINTS, "[N, P]")[1]), "[N, P]")
    return N


def waiting(s: Signature) -> tuple[str, ...]:
    """Return the names of the operands whose tokens wait in a slot, which are those that change its states."""
    inputs = ("k", "v") if s.conv is None else ("qkv",)
    return (*inputs, *(name for name in PER_TOKEN if name in GATES and s.has(name)))


def window_name(name: str) -> str:
    """Return the name of the operand that holds the waiting tokens of operand ``name``."""
    return f"pool.window.{name}"


def _window_shape(s: Signature, kind: PoolKind, name: str) -> tuple[int, ...]:
    channels = {"g": s.groups}
    if name == "erase" and s.variant.erase.value == "channel":
        channels[name] = s.K
    if name == "write" and s.variant.write.value == "channel":
        channels[name] = s.V
    if name in GATES:
        many = channels.get(name, 1)
        return (kind.slots, kind.room, s.HV, *((many,) if many > 1 else ()))
    if name == "qkv":
        assert s.conv is not None
        return (kind.slots, kind.room, s.conv.channels)
    return (kind.slots, kind.room, *((s.H, s.K) if name == "k" else (s.HV, s.V)))


def pool_kind(s: Signature, options: UpdateOptions, meta: Mapping[str, Meta]) -> PoolKind:
    """Describe the pool of an update, after checking that it fits the call.

    Args:
        s: the call, without its pool.
        options: the options of the update.
        meta: the metadata of the operands, including those of the pool and the batch.

    Raises:
        GdnError: the pool, the window or the checkpoints do not fit the call.
    """
    slots = rank(meta, RECURRENT, "[S, HV, K, V]")[0]
    takes(meta, POOL_OPERANDS[RECURRENT])
    if slots < 1:
        raise bad(RECURRENT, "of no slots", "have slot 0, which is null, and one for each request")
    inner = (s.K, s.V) if s.state_layout == "kv" else (s.V, s.K)
    form = "[S, HV, K, V]" if s.state_layout == "kv" else "[S, HV, V, K]"
    given = tuple(meta[RECURRENT].shape)
    if given != (slots, s.HV, *inner):
        other = "vk" if s.state_layout == "kv" else "kv"
        hint = f" (it looks like state_layout={other!r})" if given == (slots, s.HV, *inner[::-1]) else ""
        raise bad(
            RECURRENT,
            f"of shape {shape_of(given)}{hint}",
            f"have shape {form} = {shape_of((slots, s.HV, *inner))} for state_layout={s.state_layout!r}",
        )
    _check_conv(s, slots, meta)
    windows = [name for name in meta if name.startswith("pool.window.")]
    room = 0
    if windows:
        if PENDING not in meta:
            raise bad(PENDING, "None", "count the tokens that wait in each slot, [S], since pool.window is there")
        takes(meta, POOL_OPERANDS[PENDING])
        expect(meta, PENDING, (slots,), "[S]")
        room = rank(meta, windows[0], "[" + ", ".join("." * len(meta[windows[0]].shape)) + "]")[1]
    kind = PoolKind(slots, room, _window(options, room), meta[RECURRENT].dtype, *_checkpoints(options, meta))
    if windows:
        _check_windows(s, kind, meta, windows)
    return kind


def _check_conv(s: Signature, slots: int, meta: Mapping[str, Meta]) -> None:
    if s.conv is None:
        if CONV in meta:
            raise bad(CONV, "given", "be None: a call without a convolution has no inputs of one")
        return
    if CONV not in meta:
        raise bad(
            CONV,
            "None",
            "hold the last inputs of the convolution; make the pool with conv_width and the channels' sizes",
        )
    expect(meta, CONV, (slots, s.conv.width - 1, s.conv.channels), "[S, W - 1, channels]")
    takes(meta, POOL_OPERANDS[CONV])
    if meta[CONV].dtype not in (s.dtype, "float32"):
        raise bad(CONV, f"of dtype {meta[CONV].dtype}", f"be {s.dtype}, the inputs' own, or float32")


def _window(options: UpdateOptions, room: int) -> int:
    window = room if options.window is None else options.window
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 0:
        raise bad("window", repr(window), "be None or the number of tokens that a row may leave waiting, 0 or more")
    if window > room:
        raise bad("window", window, f"be at most {room}, the tokens that can wait in a slot of this pool")
    return int(window)


def _checkpoints(options: UpdateOptions, meta: Mapping[str, Meta]) -> tuple[int, int]:
    every = options.checkpoint_every
    if every is None:
        if _CHECKPOINTS in meta:
            raise bad("checkpoint_every", "None", f"be the tokens between checkpoints, since {_CHECKPOINTS} is given")
        return 0, 0
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)) or every < 1:
        raise bad("checkpoint_every", repr(every), "be None or a positive integer")
    if _CHECKPOINTS not in meta:
        raise bad(_CHECKPOINTS, "None", "name slots for the checkpoints, since checkpoint_every is given")
    return int(every), meta[_CHECKPOINTS].shape[1]


def _check_windows(s: Signature, kind: PoolKind, meta: Mapping[str, Meta], given: list[str]) -> None:
    names = waiting(s)
    for name in names:
        held = window_operand(name, s.dtype)
        if held.name not in meta:
            raise GdnError(
                f"pool.window holds {', '.join(n.rpartition('.')[2] for n in given)}, and this call's waiting tokens "
                f"are {', '.join(names)}; make the pool for this variant (state_pool's variant)."
            )
        takes(meta, held)
        shape = _window_shape(s, kind, name)
        expect(meta, held.name, shape, "[S, R, " + ", ".join(held.axes[2 : len(shape)]) + "]")
    for name in given:
        if name.rpartition(".")[2] not in names:
            raise bad(name, "given", f"be left out: this call's waiting tokens are {', '.join(names)}")


def call_of(s: Signature, **changes: Any) -> Signature:
    """Return the signature of the call that an update would be without a pool: with its tokens and parameters only."""
    names = tuple(n for n in s.operands if not n.startswith(("pool.", "batch.")))
    return replace(s, **{"operands": names, "update": None, **changes})


# Contents of a batch. -------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a batch. Arrays are int32 [N] unless stated otherwise; inactive rows have no tokens and slot 0.

    Attributes:
        begin: the row's first token.
        length: its number of tokens.
        read: the slot that it reads, or 0 if the request starts from zeros.
        write: the slot that it writes.
        accepted: how many of the tokens that wait in the slot read are committed.
        start: the number of the request's tokens that the states of the slot contain.
        waits: 1 if the row's own tokens wait, else 0.
        alive: whether the row is active, boolean [N].
    """

    begin: Array
    length: Array
    read: Array
    write: Array
    accepted: Array
    start: Array
    waits: Array
    alive: Array

    @property
    def committed(self) -> Array:
        """The number of tokens that each row commits: the accepted ones, and its own unless they wait."""
        return self.accepted + self.length * (1 - self.waits)


def rows_of(xp: Namespace, s: Signature, x: Mapping[str, Array]) -> Rows:
    """Compute the rows of an update's batch.

    Args:
        xp: the array namespace.
        s: the update.
        x: operands in that namespace, of which only the batch's arrays and ``pool.pending`` are used.
    """
    kind = s.update
    assert kind is not None
    zero = lambda a: xp.zeros_like(a)  # noqa: E731
    whole = lambda a: xp.astype(a, xp.int32)  # noqa: E731

    def slot(name: str) -> Array:
        index = x[name]
        return whole(xp.where((index > 0) & (index < kind.slots), index, zero(index)))

    bounds = x[_STARTS]
    bounds = whole(xp.clip(bounds, 0, s.T))
    begin = bounds[:-1]
    length = xp.where(bounds[1:] > begin, bounds[1:] - begin, zero(begin))
    computed = x[_COMPUTED]
    computed = whole(xp.where(computed > 0, computed, zero(computed)))
    fresh = computed == 0
    write = slot(_WRITE)
    read = xp.where(fresh, zero(write), slot(_READ) if _READ in x else write)
    alive = (length > 0) & (write > 0) & (fresh | (read > 0))
    length, read, write = (xp.where(alive, a, zero(a)) for a in (length, read, write))
    accepted = zero(length)
    if kind.room:
        pending = whole(xp.clip(x[PENDING], 0, kind.room))[read]
        given = pending if _ACCEPTED not in x else whole(xp.clip(x[_ACCEPTED], 0, kind.room))
        accepted = xp.where(alive & ~fresh, xp.where(given < pending, given, pending), accepted)
    start = xp.where(computed > accepted, computed - accepted, zero(computed))
    waits = xp.astype(alive & (length <= kind.window), xp.int32) if kind.window else zero(length)
    return Rows(begin, length, read, write, accepted, start, waits, alive)


def crossed(rows: Rows, every: int, number: int) -> Array:
    """Return how many tokens each row must commit to reach multiple ``number`` of ``every``, counted from its next one.

    Number 0 is the next multiple. The row reaches it only if the result is at most ``rows.committed``.
    """
    return (rows.start // every + 1 + number) * every - rows.start


def most_crossed(tokens: int, every: int) -> int:
    """Return the largest number of multiples of ``every`` that a row of so many tokens can reach."""
    return (tokens - 1) // every + 1 if tokens else 0


def token_rows(xp: Namespace, s: Signature, rows: Rows, like: Array) -> tuple[Array, Array]:
    """Return for each token [T] its row, and whether that row exists and is active."""
    token = xp.arange(s.T, dtype=xp.int32, **({} if s.library != "torch" else {"device": like.device}))
    inside = (token[:, None] >= rows.begin) & (token[:, None] < rows.begin + rows.length)
    return xp.argmax(xp.astype(inside, xp.int32), axis=1), xp.any(inside, axis=1)


def batch_conditions(xp: Namespace, s: Signature, x: Mapping[str, Array]) -> Iterator[tuple[Array, str]]:
    """Yield each condition on a batch's contents, with the sentence for an error if it does not hold.

    Args:
        xp: the array namespace.
        s: the update.
        x: operands, as ``rows_of`` takes them.
    """
    kind = s.update
    assert kind is not None
    rows = rows_of(xp, s, x)
    starts = x[_STARTS]
    yield starts[0] == 0, f"{_STARTS} does not start at 0; it must."
    yield xp.all(starts[1:] >= starts[:-1]), f"{_STARTS} decreases; it must never."
    yield starts[-1] <= s.T, f"{_STARTS} ends behind T = {s.T}; it must end there or before."
    for name in (_WRITE, _READ, _CHECKPOINTS):
        if name in x:
            yield (
                xp.all(x[name] < kind.slots),
                f"{name} names slots that the pool does not have; all must be below {kind.slots}.",
            )
    for name in (_COMPUTED, _ACCEPTED):
        if name in x:
            yield xp.all(x[name] >= 0), f"{name} holds negative counts; none may be."
    if _READ in x:
        lost = (x[_READ] <= 0) & (x[_COMPUTED] > 0) & (x[_WRITE] > 0) & (starts[1:] > starts[:-1])
        yield xp.all(~lost), f"{_READ} names no slot for a row whose request has tokens computed; it must."
    if kind.room and _ACCEPTED in x:
        pending = x[PENDING][rows.read]
        over = rows.alive & (rows.read > 0) & (pending > 0) & (x[_ACCEPTED] > pending)
        yield (
            xp.all(~over),
            f"{_ACCEPTED} is more than the tokens that wait in a row's slot; it must be at most as many.",
        )
    written = [rows.write]
    if kind.columns:
        columns = xp.where(rows.alive[:, None], x[_CHECKPOINTS], xp.zeros_like(x[_CHECKPOINTS]))
        columns = xp.where(columns < kind.slots, columns, xp.zeros_like(columns))
        written.append(xp.reshape(xp.astype(columns, xp.int32), (-1,)))
    slots = xp.sort(xp.concat(written))
    twice = (slots[1:] == slots[:-1]) & (slots[1:] > 0)
    yield (
        xp.all(~twice),
        "batch.state_indices or batch.checkpoint_indices name one slot for two to write; each must be its own.",
    )
