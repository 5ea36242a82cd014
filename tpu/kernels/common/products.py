"""The product inside a kernel: what is rounded, and how, stands in the program.

On a TPU a float32 product left to itself is one pass of bfloat16, and an interpreter computes it in float32: only
operands rounded here, and a precision stated for every product, make both do the same arithmetic. Three passes are
written out because not every Mosaic takes ``Precision.HIGH``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from ....spec.precision import DEFAULT, FAST, HIGHEST
from .summands import Parts, exact_pieces, pieces

__all__ = ["KEPT", "KernelProduct", "dot", "exact_sums"]

Array = Any
Operand = Array | Parts

#: What each operand keeps by the precision of the call; "bfloat16x3" is a sum of two bfloat16 halves, 16 bits.
KEPT: Mapping[str, Mapping[str, str]] = {"highest": HIGHEST, "default": DEFAULT, "fast": FAST}

#: Which of the last two dimensions of each operand are contracted.
_CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


class KernelProduct:
    """Products over the last two dimensions of float32 values, operands rounded by name; a ``spec.stages.Product``.

    Leading dimensions broadcast: [.., M, K] times [.., K, N] is [.., M, N] float32. What enters several products may be
    given as its ``parts``, so that it is rounded once.
    """

    def __init__(self, precision: str) -> None:
        self.kept = KEPT[precision]

    def __call__(self, a: Operand, b: Operand, name_a: str, name_b: str) -> Array:
        """a b."""
        return self._product("nn", a, b, name_a, name_b)

    def right_transposed(self, a: Operand, b: Operand, name_a: str, name_b: str) -> Array:
        """a b^T, [.., M, K] with [.., N, K]."""
        return self._product("nt", a, b, name_a, name_b)

    def left_transposed(self, a: Operand, b: Operand, name_a: str, name_b: str) -> Array:
        """a^T b, [.., K, M] with [.., K, N]."""
        return self._product("tn", a, b, name_a, name_b)

    def _product(self, form: str, a: Operand, b: Operand, name_a: str, name_b: str) -> Array:
        left, right = self.parts(a, name_a), self.parts(b, name_b)
        lead = jnp.broadcast_shapes(left[0].shape[:-2], right[0].shape[:-2])
        left, right = (tuple(_flat(x, lead) for x in parts) for parts in (left, right))
        # The product of the two low halves is below what is kept; the small terms are added up first.
        first, *rest = [(x, y) for i, x in enumerate(left) for j, y in enumerate(right) if i + j < 2]
        out = sum(dot(x, y, form) for x, y in rest) + dot(*first, form) if rest else dot(*first, form)
        return jnp.reshape(out, (*lead, *out.shape[-2:]))

    def parts(self, x: Operand, name: str) -> Parts:
        """What enters the passes: x itself, its rounding, or its two halves, the larger first."""
        if isinstance(x, tuple):
            return x
        kept = self.kept.get(name, "float32")
        return (x,) if kept == "float32" else pieces(x, 1 if kept == "bfloat16" else 2)


def exact_sums(ones: Array, x: Array) -> Array:
    """ones x, [M, K] of zeros and ones with x [.., K, N] float32: sums of rows, in float32 whatever the precision.

    Three bfloat16 pieces add up to a float32 number, so three passes are enough, and ones are exact.
    """
    lead, x = x.shape[:-2], _flat(x, x.shape[:-2])
    ones = jnp.broadcast_to(ones.astype(jnp.bfloat16), (*x.shape[:-2], *ones.shape))
    high, middle, low = exact_pieces(x)
    out = dot(ones, high) + (dot(ones, middle) + dot(ones, low))
    return jnp.reshape(out, (*lead, *out.shape[-2:]))


def _flat(x: Array, lead: tuple[int, ...]) -> Array:
    """The leading dimensions as one, since Mosaic batches over one, or none."""
    if not lead:
        return x
    if x.shape[:-2] != lead:
        x = jnp.broadcast_to(x, (*lead, *x.shape[-2:]))
    return jnp.reshape(x, (-1, *x.shape[-2:]))


def dot(a: Array, b: Array, form: str = "nn") -> Array:
    """The product over the last two dimensions, in float32: of bfloat16 operands as they are, of float32 ones with
    nothing rounded away. form: "nn" for a b, "nt" for a b^T, "tn" for a^T b; leading dimensions are a batch."""
    if a.dtype != b.dtype:  # a half-precision operand beside one that keeps float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    exact, batch = a.dtype == jnp.float32, tuple(range(a.ndim - 2))
    left, right = (len(batch) + n for n in _CONTRACTED[form])
    return lax.dot_general(
        a,
        b,
        (((left,), (right,)), (batch, batch)),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
