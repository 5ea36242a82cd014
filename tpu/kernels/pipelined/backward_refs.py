"""The references of the backward kernel for long rows, by name; the same trees hold the blocks they are made from.

Blocks are of the U chunks of a grid step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["Inputs", "Outputs", "Refs"]

Ref = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What the kernel reads.

    Attributes:
        q, k: [1, tokens, P * 128] bfloat16.
        g, b: log decay and gate, [1, 1, heads, tokens] float32.
        S: states that the chunks start from, [1, U, heads, 128, 128] float32.
        M, u: what the forward pass solved, [1, U, heads, summands, 128, 128] bfloat16.
        dO: cotangent of the output [1, tokens, heads * 128].
        dS_last: transposed cotangent of the final states [1, heads, 128, 128] float32.
    """

    q: Ref
    k: Ref
    g: Ref
    b: Ref
    S: Ref
    M: Ref
    u: Ref
    dO: Ref
    dS_last: Ref


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What the kernel writes: cotangents of the operands, in the shapes of the operands, and the transposed cotangent
    of the states that sequences start from."""

    dq: Ref
    dk: Ref
    dv: Ref
    dg: Ref
    db: Ref
    dS_first: Ref


@dataclass(frozen=True)
class Refs:
    """All references; dSt: the transposed cotangent of the state behind the chunk at hand, [heads, 128, 128]
    float32."""

    x: Inputs
    out: Outputs
    dSt: Ref
