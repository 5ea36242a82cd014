"""The references of the backward kernel for long rows, by name; the same trees hold the blocks they are made from.

Blocks are of the U chunks of a grid step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["Inputs", "NormInputs", "Outputs", "Refs"]

Ref = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormInputs:
    """What an output norm read: o and z [1, tokens, heads * 128], z None without a gate; weight [1, 128] float32."""

    o: Ref
    z: Ref | None
    weight: Ref


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
        norm: what the output's norm read, or None without one; dO is then the cotangent of the normed output.
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
    norm: NormInputs | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What the kernel writes: cotangents of the operands, in the shapes of the operands, and the transposed cotangent
    of the states that sequences start from; with a norm that of z, if there is one, and sums for that of its weight,
    [1, 8, 128] float32, which a part's grid steps add up."""

    dq: Ref
    dk: Ref
    dv: Ref
    dg: Ref
    db: Ref
    dS_first: Ref
    dz: Ref | None = None
    norm_sums: Ref | None = None


@dataclass(frozen=True)
class Refs:
    """All references; dSt: the transposed cotangent of the state behind the chunk at hand, [heads, 128, 128]
    float32."""

    x: Inputs
    out: Outputs
    dSt: Ref
