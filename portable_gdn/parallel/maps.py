"""Compute the map S -> A S + B of a device's piece of the tokens, from the last tokens alone if the rule forgets.

The state that enters the last tokens of a piece is multiplied by their decays. If the product is below the smallest
float32, everything before these tokens is forgotten: A is 0, and B is the final state of the last tokens, begun from
zeros. Each device decides this at run time by a bound on the norm of the last tokens' map. Otherwise, one call with the
whole piece gives A and B (``spec/transition.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..door import normalise
from ..spec.jax_tracing import own_settings, varying_like
from ..spec.operands import WITH_TOKENS
from ..spec.prologue import prepare
from ..spec.transition import Transition, apart, widened, widened_state

__all__ = ["FORGOTTEN", "Piece", "last_tokens", "log_norm", "map_of", "taking"]

Array = Any
Operands = dict[str, Array]

#: Natural logarithm of a norm below which a map takes every float32 of at most 1 to less than the smallest one.
FORGOTTEN = 149 * math.log(0.5) - 1.0
#: A piece's last tokens are this part of it, in steps of so many; shorter pieces are taken whole.
_PART, _STEP = 8, 32


class Piece(NamedTuple):
    """The call of a piece without its arrays; hashable.

    Attributes:
        K, V: The numbers of key and value channels.
        options: The options of the call, which ask for final states.
        backend: The name of a backend, or None.
        packed: Whether the call has ``cu_seqlens``.
        decays: Whether the rule has a decay.
    """

    size: int
    K: int
    V: int
    options: Any
    backend: str | None
    packed: bool
    decays: bool


_taken: list[bool] = []


@contextmanager
def taking(forgets: bool) -> Iterator[None]:
    """Trace calls as if all of them forgot, or none: to compile and time one of the two programs, not to compute."""
    jax.clear_caches()  # a call is traced once
    _taken.append(forgets)
    try:
        yield
    finally:
        _taken.pop()
        jax.clear_caches()


def last_tokens(size: int) -> int:
    """Return how many last tokens of a piece of ``size`` are examined; 0 if the piece is always computed as a whole."""
    n = -(-size // (_PART * _STEP)) * _STEP
    return n if 2 * n <= size else 0


def log_norm(k: Array, g: Array, b: Array | None) -> Array:
    """Return an upper bound on log ||A||_2 for the map A of the given tokens, by row and value head: [B, HV].

    The map of one token is (I - k (b k)^T) diag(exp(g)). Its norm is at most the largest singular value of the first
    factor, which differs from I by rank one, times the largest decay. The bounds of the tokens are multiplied.

    Args:
        k: Keys [B, T, H, K].
        g: Log decays [B, T, HV, n].
        b: Erase gates [B, T, HV, 1 or K], or None.
    """
    decay = jnp.max(g, axis=-1) + 2.0**-20  # what follows is right to some roundings a token
    if b is None:
        return jnp.sum(decay, axis=1)
    k = jnp.repeat(k, g.shape[2] // k.shape[2], axis=2)
    w = b * k
    s = jnp.sum(k * w, -1)
    more = jnp.sum(k * k, -1) * jnp.sum(w * w, -1)
    trace, det = 2 - 2 * s + more, (1 - s) ** 2
    square = (trace + jnp.sqrt(jnp.maximum(trace**2 - 4 * det, 0))) / 2
    return jnp.sum(decay + 0.5 * jnp.log(square), axis=1)


def map_of(piece: Piece, x: Operands, own: Array, enters: Array | None, begins: Array | None) -> Transition:
    """Return the maps of a piece, A [N, HV, K, K] and B [N, HV, K, V], one for each sequence.

    Args:
        piece: The call of the piece.
        x: Its operands, without states.
        own: Initial states of the sequences that begin in the piece [N, HV, K, V]; zeros for the others.
        enters: [N], whether a sequence continues from the piece before; None means all of them do.
        begins: [N], the position in the piece at which each packed sequence begins; negative if it begins earlier.
    """
    x = x | {"own": own}
    floats = {n: a for n, a in x.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    others = {n: a for n, a in x.items() if n not in floats}
    others |= {n: a for n, a in (("enters", enters), ("begins", begins)) if a is not None}
    every = (*floats.values(), *others.values())
    return _found(piece, varying_like(floats, *every), varying_like(others, *every))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@own_settings
def _found(piece: Piece, floats: Operands, others: Operands) -> Transition:
    return _chosen(piece, floats, others, lambda: _last(piece, floats, others), lambda: _whole(piece, floats, others))


def _kept(piece: Piece, floats: Operands, others: Operands) -> tuple[Transition, tuple[Operands, Operands]]:
    return _found(piece, floats, others), (floats, others)


@own_settings
def _pulled(piece: Piece, kept: tuple[Operands, Operands], d: Transition) -> tuple[Operands, None]:
    """Return the gradient of the branch that was taken, whose forward pass is computed again.

    A conditional would otherwise keep the residuals of both branches.
    """
    floats, others = kept
    pull = lambda way: jax.vjp(lambda floats: way(piece, floats, others), floats)[1](d)[0]  # noqa: E731
    return _chosen(piece, floats, others, lambda: pull(_last), lambda: pull(_whole)), None


_found.defvjp(_kept, _pulled)


def _chosen(piece: Piece, floats: Operands, others: Operands, last: Callable[[], Any], whole: Callable[[], Any]) -> Any:
    n = last_tokens(piece.size)
    if not n or not piece.decays:
        return whole()
    if _taken:
        return last() if _taken[-1] else whole()
    x = _of_last(piece, {**floats, **others}, n)
    problem, _ = normalise(x, piece.options, piece.backend)
    p = prepare(jnp, problem.signature, problem.operands)
    return lax.cond(jnp.all(log_norm(p.k, p.g, p.b) < FORGOTTEN), last, whole)


def _of_last(piece: Piece, x: Operands, n: int) -> Operands:
    """Return the operands of the last tokens, without boundaries and states."""
    x = {name: a for name, a in x.items() if name not in ("own", "enters", "begins", "cu_seqlens")}
    return {name: a[:, piece.size - n :] if name in WITH_TOKENS else a for name, a in x.items()}


def _last(piece: Piece, floats: Operands, others: Operands) -> Transition:
    """Return the maps if the last tokens forget everything before them."""
    n = last_tokens(piece.size)
    x, own = _of_last(piece, {**floats, **others}, n), floats["own"]
    if piece.packed:
        bounds = others["cu_seqlens"]
        x["cu_seqlens"] = jnp.clip(bounds - (piece.size - n), 0, n)
        own = jnp.where((others["begins"] >= piece.size - n)[:, None, None, None], own, 0)
    else:
        own = jnp.zeros_like(own)
    x["initial_state"] = own
    problem, chosen = normalise(x, piece.options, piece.backend)
    B = chosen.run(problem).state
    assert B is not None
    return Transition(varying_like(jnp.zeros((*B.shape[:2], piece.K, piece.K), B.dtype), B), B)


def _whole(piece: Piece, floats: Operands, others: Operands) -> Transition:
    """Return the maps of any piece."""
    x = {**floats, **others}
    enters, own = x.pop("enters", None), x.pop("own")
    x.pop("begins", None)
    x["initial_state"] = widened_state(jnp, own, enters)
    problem, chosen = normalise(widened(jnp, x, piece.K), piece.options, piece.backend)
    state = chosen.run(problem).state
    assert state is not None
    return apart(state, piece.V)
