"""The map of a device's piece of the tokens, S -> A S + B, at the least cost: of a rule that forgets, its last tokens.

The state that enters the last tokens of a piece is multiplied by their decays. Where these come to less than the
smallest float32, whatever was before them is gone: A is 0, and B is the state that the last tokens alone leave from
zeros. That is decided by a bound on the norm of the last tokens' map, at run time, on each device for itself; elsewhere
one call of the whole piece finds A and B (``spec/transition.py``).
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
    """A piece's call without its arrays, hashable: its tokens, value channels, options and backend, and its sequences.

    K and V: channels. options: with final states. backend: a name, or None. packed: whether it has ``cu_seqlens``.
    decays: whether it has a decay.
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
    """Within it, calls are traced as if all of them forgot, or none. To compile and time the one program or the other,
    not to compute."""
    jax.clear_caches()  # a call is traced once
    _taken.append(forgets)
    try:
        yield
    finally:
        _taken.pop()
        jax.clear_caches()


def last_tokens(size: int) -> int:
    """How many last tokens of a piece of ``size`` are looked at; 0 where it is taken whole."""
    n = -(-size // (_PART * _STEP)) * _STEP
    return n if 2 * n <= size else 0


def log_norm(k: Array, g: Array, b: Array | None) -> Array:
    """A bound on the natural logarithm of the norm of the map A of tokens, by row and value head: [B, HV].

    A token's is that of (I - k (b k)^T) diag(exp(g)): the largest singular value of the one, which a matrix of two
    columns has, times the largest decay.

    Args:
        k: keys [B, T, H, K]; g: log decays [B, T, HV, n]; b: erase gates [B, T, HV, 1 or K], or None.
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
    """The maps of a piece: A [N, HV, K, K] and B [N, HV, K, V], for each sequence.

    Args:
        piece: what is called.
        x: its operands, without states.
        own: states of sequences that begin in the piece [N, HV, K, V]; zeros for those that enter it.
        enters: [N], whether a sequence enters the piece from before; None is all.
        begins: [N], of packed sequences, where in the piece they begin, or a number below 0.
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
    """The gradient by the way that was taken, computed again: branches that keep what they need would fill memory with
    what the other one needs."""
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
    """The call's operands, of the last tokens alone, without bounds and states."""
    x = {name: a for name, a in x.items() if name not in ("own", "enters", "begins", "cu_seqlens")}
    return {name: a[:, piece.size - n :] if name in WITH_TOKENS else a for name, a in x.items()}


def _last(piece: Piece, floats: Operands, others: Operands) -> Transition:
    """The maps, where the last tokens forget all before them."""
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
    """The maps of any piece."""
    x = {**floats, **others}
    enters, own = x.pop("enters", None), x.pop("own")
    x.pop("begins", None)
    x["initial_state"] = widened_state(jnp, own, enters)
    problem, chosen = normalise(widened(jnp, x, piece.K), piece.options, piece.backend)
    state = chosen.run(problem).state
    assert state is not None
    return apart(state, piece.V)
