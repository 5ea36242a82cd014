"""How a decoder computes, and the projections that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..layers.axes import named

__all__ = ["Axis", "Numerics"]

Axis = tuple[str | None, int] | None


@dataclass(frozen=True)
class Numerics:
    """How a decoder computes: dtype of the computation (None is the weights') and precision of plain products."""

    dtype: Any = None
    precision: Any = None
    param_dtype: Any = jnp.float32

    def linear(
        self,
        inside: int,
        out: int,
        rngs: nnx.Rngs,
        axes: tuple[Axis, Axis] = (None, None),
        bias: bool = False,
    ) -> nnx.Linear:
        """A projection: kernel [inside, out], and bias [out] if asked for; ``axes`` names rows and columns, and says
        how many whole things each has."""
        made = nnx.Linear(
            inside,
            out,
            use_bias=bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            rngs=rngs,
        )
        named(made.kernel, *axes)
        if made.bias is not None:
            named(made.bias, axes[1])
        return made
