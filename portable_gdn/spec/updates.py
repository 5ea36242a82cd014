"""An update of a pool through any backend's ``run``: gather the rows' states, compute calls, scatter the new states.

Every token that may wait or has waited is computed in a call of one token. A whole window, its tokens one after
another, and the tokens computed again after a rejection therefore take identical steps. Longer rows are one packed
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import array_api_compat.numpy as host
import numpy as np

from .operands import BATCH_OPERANDS, GATES, WITH_TOKENS
from .problem import Problem, Result, UpdateResult
from .slots import CONV, PENDING, RECURRENT, call_of, rows_of, waiting, window_name
from .stages import Array
from .torch_tensors import on_host

__all__ = ["update_by_run"]

Run = Callable[[Problem], Result]


def update_by_run(run: Run, problem: Problem) -> UpdateResult:
    """Compute an update, and return its outputs and its pool.

    A pool of torch tensors is the caller's, written in place; otherwise the pool is new.

    Args:
        run: computes a call.
        problem: an update whose batch and pending counts can be read.
    """
    if problem.signature.library == "torch":
        import torch

        with torch.no_grad():
            return _Update(run, problem).result()
    return _Update(run, problem).result()


class _Update:
    """An update in progress: the states of the active rows, all gathered before anything is written."""

    def __init__(self, run: Run, problem: Problem) -> None:
        s, x = problem
        assert s.update is not None
        self.run, self.s, self.x, self.kind = run, s, x, s.update
        self.like = x["qkv"] if "qkv" in x else x["v"]
        self.xp = array_api_compat.array_namespace(self.like)
        self.where: dict[str, Any] = {"device": self.like.device} if s.library == "torch" else {}
        facts = {name: on_host(x[name]) for name in (*BATCH_OPERANDS, PENDING) if name in x}
        rows = rows_of(host, s, facts)
        self.rows = rows._replace(**{name: a[rows.alive] for name, a in rows._asdict().items()})
        self.slots = np.full((len(rows.alive), self.kind.columns), 0)
        if self.kind.columns:
            given = facts["batch.checkpoint_indices"]
            self.slots = np.where((given > 0) & (given < self.kind.slots), given, 0)
        self.slots = self.slots[rows.alive]
        self.done = np.zeros(len(self.rows.read), int)  # tokens that each row has committed
        self.pool = {name: a for name, a in x.items() if name.startswith("pool.")}
        fresh = self._index(self.rows.read == 0)
        self.state = self._gather(RECURRENT, fresh)
        self.inputs = None if s.conv is None else self._gather(CONV, fresh)
        self.waiting = {
            name: self.pool[window_name(name)][self._index(self.rows.read)] for name in waiting(s) if self.kind.room
        }
        if s.library != "torch":
            self.pool = {name: a.copy() for name, a in self.pool.items()}

    def _index(self, a: np.ndarray) -> Array:
        return self.xp.asarray(a if a.dtype == bool else a.astype(np.int64), **self.where)

    def _gather(self, name: str, fresh: Array) -> Array:
        found = self.xp.astype(self.pool[name][self._index(self.rows.read)], self.xp.float32)
        return self.xp.where(fresh[:, *[None] * (found.ndim - 1)], self.xp.zeros_like(found), found)

    def result(self) -> UpdateResult:
        """Compute the update, and write its results."""
        s, rows = self.s, self.rows
        o = self.xp.zeros((s.T, s.HV, s.V), dtype=self.like.dtype, **self.where)
        if len(rows.read):
            for number in range(int(rows.accepted.max())):
                some = np.flatnonzero(rows.accepted > number)
                self._commit(some, *self._one(some, self._waiting(some, number))[1:])
            kept = self.state, self.inputs
            short = np.flatnonzero(rows.length <= max(self.kind.window, 1))
            for number in range(int(rows.length[short].max(initial=0))):
                some = short[rows.length[short] > number]
                at = rows.begin[some] + number
                out, state, inputs = self._one(some, self._tokens(at))
                o[self._index(at)] = out
                self._commit(some[rows.waits[some] == 0], *self._of(rows.waits[some] == 0, state, inputs))
                self._set(some, state, inputs)
            long = np.flatnonzero(rows.length > max(self.kind.window, 1))
            while len(long):
                long = self._piece(long, o)
            self._write(kept)
        return UpdateResult(o, self.pool)

    # Computing tokens of some rows.

    def _one(self, some: np.ndarray, tokens: dict[str, Array]) -> tuple[Array, Array, Array | None]:
        """Compute o [n, HV, V] and the states after one token of each of n rows, from operands [n, ...]."""
        tokens = {name: a[:, None] for name, a in tokens.items()}
        out, state, inputs = self._call(some, tokens, B=len(some), T=1)
        return out[:, 0], state, inputs

    def _piece(self, some: np.ndarray, o: Array) -> np.ndarray:
        """Commit tokens of rows up to their next checkpoint or end, and return the rows that have more tokens."""
        rows, every = self.rows, self.kind.checkpoint_every
        first = self.done[some] - rows.accepted[some]
        left = rows.length[some] - first
        size = left
        if every:
            ahead = every - (rows.start[some] + self.done[some]) % every
            size = np.minimum(left, ahead)
        at = np.concatenate([np.arange(a, a + n) for a, n in zip(rows.begin[some] + first, size, strict=True)])
        tokens = {name: a[None] for name, a in self._tokens(at).items()}
        tokens["cu_seqlens"] = np.concatenate([[0], np.cumsum(size)]).astype(np.int32)
        out, state, inputs = self._call(some, tokens, B=1, T=len(at))
        o[self._index(at)] = out[0]
        self._commit(some, state, inputs, size)
        return some[left > size]

    def _call(self, some: np.ndarray, tokens: dict[str, Array], **sizes: int) -> tuple[Array, Array, Array | None]:
        x = {name: a for name, a in self.x.items() if not name.startswith(("pool.", "batch.")) and name not in tokens}
        x = {**{name: a for name, a in x.items() if name not in WITH_TOKENS}, **tokens}
        norm = self.s.norm
        if "z" not in tokens and norm is not None and norm.activation is not None:
            norm = None  # waiting tokens have no output, and no output gate
            x.pop("norm_weight", None)
        x["initial_state"] = self.state[self._index(some)]
        if self.inputs is not None:
            x["conv_state"] = self.inputs[self._index(some)]
        s = call_of(self.s, N=len(some), operands=tuple(x), norm=norm, output_final_state=True, **sizes)
        return self.run(Problem(s, x))

    def _tokens(self, at: np.ndarray) -> dict[str, Array]:
        """Return the update's operands at some tokens."""
        index = self._index(at)
        return {name: a[index] for name, a in self.x.items() if name in WITH_TOKENS}

    def _waiting(self, some: np.ndarray, number: int) -> dict[str, Array]:
        """Return the operands of waiting token ``number`` of each of some rows; its output will not be used."""
        s = self.s
        x = {name: a[self._index(some), number] for name, a in self.waiting.items()}
        for name in (n for n in x if n in GATES):
            x[name] = self.xp.reshape(x[name], (len(some), *self.x[name].shape[1:]))
        if s.conv is None:
            return {**x, "q": x["k"]}
        if not s.conv.fused:
            qkv, keys = x.pop("qkv"), s.H * s.K
            x |= {"q": qkv[:, :keys], "k": qkv[:, keys : 2 * keys], "v": qkv[:, 2 * keys :]}
        return x

    # States and slots.

    @staticmethod
    def _of(which: np.ndarray, *arrays: Array | None) -> list[Array | None]:
        return [None if a is None else a[np.flatnonzero(which)] for a in arrays]

    def _set(self, some: np.ndarray, state: Array, inputs: Array | None) -> None:
        """Set the states of some rows, in new arrays, since the old ones may still be needed."""
        index = self._index(some)
        self.state = _replaced(self.state, index, state)
        if self.inputs is not None:
            self.inputs = _replaced(self.inputs, index, inputs)

    def _commit(self, some: np.ndarray, state: Array, inputs: Array | None, tokens: Any = 1) -> None:
        """Record the states that some rows have after committing more tokens, and write those that are checkpoints."""
        if not len(some):
            return
        self._set(some, state, inputs)
        self.done[some] += tokens
        every = self.kind.checkpoint_every
        if not every:
            return
        count = self.rows.start[some] + self.done[some]
        column = count // every - self.rows.start[some] // every - 1
        there = (count % every == 0) & (column < self.kind.columns)
        slot = np.where(
            there, self.slots[some, np.minimum(column, self.kind.columns - 1)] if self.kind.columns else 0, 0
        )
        self._put(slot, *self._of(np.ones(len(some), bool), state, inputs))

    def _write(self, kept: tuple[Array, Array | None]) -> None:
        """Write the rows' slots. Rows whose tokens wait keep the tokens, and the states from before them."""
        rows = self.rows
        waits = self._index(rows.waits == 1)
        state, inputs = (
            None if now is None else self.xp.where(waits[:, *[None] * (now.ndim - 1)], before, now)
            for before, now in zip(kept, (self.state, self.inputs), strict=True)
        )
        self._put(rows.write, state, inputs)
        if not self.kind.room:
            return
        self.pool[PENDING][self._index(rows.write)] = self.xp.asarray(
            (rows.length * rows.waits).astype(np.int32), **self.where
        )
        for number in range(int((rows.length * rows.waits).max())):
            some = np.flatnonzero(rows.length * rows.waits > number)
            tokens = self._tokens(rows.begin[some] + number)
            if self.s.conv is not None and not self.s.conv.fused:
                tokens["qkv"] = self.xp.concat([tokens[name] for name in "qkv"], axis=-1)
            for name in waiting(self.s):
                into = self.pool[window_name(name)]
                new = self.xp.reshape(tokens[name], (len(some), *into.shape[2:]))
                into[self._index(rows.write[some]), number] = self.xp.astype(new, into.dtype)

    def _put(self, slot: np.ndarray, state: Array, inputs: Array | None) -> None:
        """Write states to the slots that are not null; no tokens wait in a slot that was just written."""
        there = np.flatnonzero(slot)
        if not len(there):
            return
        to, of = self._index(slot[there]), self._index(there)
        self.pool[RECURRENT][to] = self.xp.astype(state[of], self.pool[RECURRENT].dtype)
        if inputs is not None:
            self.pool[CONV][to] = self.xp.astype(inputs[of], self.pool[CONV].dtype)
        if self.kind.room:
            self.pool[PENDING][to] = 0


def _replaced(a: Array, index: Array, new: Array) -> Array:
    """Return a copy of ``a`` whose rows at ``index``, in ascending order, are replaced by ``new``."""
    if len(new) == len(a):
        return new
    a = a.clone() if hasattr(a, "clone") else a.copy()
    a[index] = new
    return a
