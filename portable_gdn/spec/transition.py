"""The affine map that a piece of a sequence applies to the state: how such maps are found, joined and applied.

The rule is linear in the state. Over any tokens S_out = A S_in + B and o_t = o'_t + P_t^T S_in, with A [K, K],
B [K, V], the outputs o' from a state of zeros, and P_t [K] for each token. A sequence may therefore be cut anywhere:
the maps of all pieces are computed at once and joined in order, and each piece is corrected by the state that enters
it.

One call of the rule finds all four. The columns of the state are independent of each other, so more columns can simply
be added: with K columns of zeros next to v, and the state [0 | I], the outputs are [o' | P] and the final state is
[B | A]. Nothing is approximated: if the rule forgets, A is small, and it is computed as such.

The adjoint of S_in -> S_out is dS_in = A^T dS_out, so cotangents pass through the transposed maps in reverse order.
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
    """The map S_out = A S_in + B, in float32, or in float64 for computations in that dtype.

    Attributes:
        A: [.., K, K].
        B: [.., K, V].
    """

    A: Array
    B: Array


def moved(mm: Product, t: Transition, state: Array) -> Array:
    """Return the state [.., K, V] after the tokens of the map, from the state before them."""
    return mm(t.A, state) + t.B


def joined(mm: Product, later: Transition, earlier: Transition) -> Transition:
    """Return the map of two adjacent pieces together."""
    return Transition(mm(later.A, earlier.A), moved(mm, later, earlier.B))


def adjoint(xp: Namespace, t: Transition, d_state: Array, mm: Product) -> Array:
    """Return the cotangent of S_in [.., K, V] from that of S_out."""
    return mm(xp.matrix_transpose(t.A), d_state)


def entering(mm: Product, maps: Sequence[Transition], state: Array) -> tuple[list[Array], Array]:
    """Return the states that enter each of the pieces, in order, and the state that leaves the last."""
    found = []
    for t in maps:
        found.append(state)
        state = moved(mm, t, state)
    return found, state


def widened(xp: Namespace, x: Mapping[str, Array], K: int) -> dict[str, Array]:
    """Return operands of the bare rule with K columns of zeros appended to v, and to a write gate given per channel."""
    found = dict(x)
    for name in ("v", "write"):
        a = x.get(name)
        if a is not None and a.ndim == 4:
            found[name] = xp.concat([a, xp.zeros((*a.shape[:-1], K), dtype=a.dtype)], axis=-1)
    return found


def widened_state(xp: Namespace, state: Array, enters: Array | None = None) -> Array:
    """Return [S | I], [N, HV, K, V + K], from which a call computes the final states and the maps.

    Args:
        xp: the array namespace.
        state: [N, HV, K, V], the states of sequences that begin in the piece, and zeros for those that enter it.
        enters: [N], whether a sequence enters from another piece; the other sequences have maps of zeros. None means
            that all do.
    """
    N, HV, K, _ = state.shape
    unit = xp.broadcast_to(xp.eye(K, dtype=state.dtype), (N, HV, K, K))
    if enters is not None:
        unit = xp.where(enters[:, None, None, None], unit, xp.zeros_like(unit))
    return xp.concat([state, unit], axis=-1)


def apart(state: Array, V: int) -> Transition:
    """Return the map that the final state [.., K, V + K] of widened operands contains."""
    return Transition(state[..., V:], state[..., :V])
