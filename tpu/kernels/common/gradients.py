"""What forward kernels of both kinds hand to backward kernels, and what these return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

__all__ = ["Cotangents", "Kept", "NormOperands", "RuleGradients"]

Array = Any


class Cotangents(NamedTuple):
    """dO: of the output [B, T, HV, V]; dS: of the final states, [N, HV, K, V] float32."""

    dO: Array
    dS: Array


class NormOperands(NamedTuple):
    """What an output norm read: o and z [B, T, HV V], z None without a gate; weight [V] float32."""

    o: Array
    z: Array | None
    weight: Array


class RuleGradients(NamedTuple):
    """Cotangents of the bare rule's operands, in the shapes that the forward kernels take them.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. gates: of the log decay, and of the erase and the write gate where they are
    operands, [B, T, HV, width] float32. S: of the states that sequences start from, [N, HV, K, V] float32.
    """

    q: Array
    k: Array
    v: Array
    gates: tuple[Array, ...]
    S: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What the forward pass keeps of chunks for the backward pass, or references to it; None where it keeps nothing.

    S: the state before each chunk [.., heads, K, V] float32. M, u, Aqk: as they enter products, [.., heads,
    summands, C, C] bfloat16.
    """

    S: Array | None = None
    M: Array | None = None
    u: Array | None = None
    Aqk: Array | None = None
