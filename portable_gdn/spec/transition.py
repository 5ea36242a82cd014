"""What a piece of a sequence does to the state: an affine map, and how such maps are found, joined and applied.

The rule is linear in the state: over any tokens S_out = A S_in + B and o_t = o'_t + P_t^T S_in, with A [K, K],
B [K, V], o' the outputs from a state of zeros, and P_t [K] for each token. So a sequence may be cut anywhere: the
pieces' maps are found all at once, joined in order, and each piece corrected by the state that enters it.

One call of the rule finds all four. Columns of the state do not know of each other, so V more columns cost what they
cost: with K columns of zeros beside v, and the state [0 | I], the outputs are [o' | P] and the final state is [B | A].
Nothing is neglected: of a rule that forgets A is small, and that is what is computed.

The adjoint of S_in -> S_out is dS_in = A^T dS_out: cotangents go through the same maps, transposed, in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Transition", "adjoint", "apart", "entering", "joined", "moved", "widened", "widened_state"]

Array = Any
Namespace = Any
#: A product of matrices [.., K, K] and [.., K, n].
Product = Callable[[Array, Array], Array]


class Transition(NamedTuple):
    """S_out = A S_in + B. A: [.., K, K]; B: [.., K, V]; float32, or float64 where that is computed with."""

    A: Array
    B: Array


def moved(mm: Product, t: Transition, state: Array) -> Array:
    """The state [.., K, V] after the tokens that the map stands for."""
    return mm(t.A, state) + t.B


def joined(mm: Product, later: Transition, earlier: Transition) -> Transition:
    """The map of two pieces, the earlier one first."""
    return Transition(mm(later.A, earlier.A), moved(mm, later, earlier.B))


def adjoint(xp: Namespace, t: Transition, d_state: Array, mm: Product) -> Array:
    """The cotangent of S_in [.., K, V] from that of S_out."""
    return mm(xp.matrix_transpose(t.A), d_state)


def entering(mm: Product, maps: Sequence[Transition], state: Array) -> tuple[list[Array], Array]:
    """The state that enters each of the pieces, in order, and the one that leaves the last."""
    found = []
    for t in maps:
        found.append(state)
        state = moved(mm, t, state)
    return found, state


def widened(xp: Namespace, x: Mapping[str, Array], K: int) -> dict[str, Array]:
    """Operands of the bare rule with K columns of zeros behind those of v, and of a write gate by channel."""
    found = dict(x)
    for name in ("v", "write"):
        a = x.get(name)
        if a is not None and a.ndim == 4:
            found[name] = xp.concat([a, xp.zeros((*a.shape[:-1], K), dtype=a.dtype)], axis=-1)
    return found


def widened_state(xp: Namespace, state: Array, enters: Array | None = None) -> Array:
    """[S | I], of which a call makes the states and the map: state [N, HV, K, V] to [N, HV, K, V + K].

    Args:
        xp: the array namespace.
        state: of sequences that begin in the piece; those that enter it have zeros.
        enters: [N], whether a sequence enters from another piece; the others' maps are zeros. None is all.
    """
    N, HV, K, _ = state.shape
    unit = xp.broadcast_to(xp.eye(K, dtype=state.dtype), (N, HV, K, K))
    if enters is not None:
        unit = xp.where(enters[:, None, None, None], unit, xp.zeros_like(unit))
    return xp.concat([state, unit], axis=-1)


def apart(state: Array, V: int) -> Transition:
    """The map in a final state [.., K, V + K] of widened operands."""
    return Transition(state[..., V:], state[..., :V])
