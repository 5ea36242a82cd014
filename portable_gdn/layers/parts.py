"""The parts of a layer that have weights of their own beside its projections."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = ["GATES", "GatedNorm", "ShortConvolution"]

Array = Any
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class ShortConvolution(nnx.Module):
    """Weights of a causal depthwise convolution: kernel [W, 1, channels] (as nnx.Conv has it), bias [channels] or
    None."""

    def __init__(self, channels: int, width: int, bias: bool, param_dtype: Any, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", in_axis=0, out_axis=2)
        self.kernel = nnx.Param(init(rngs.params(), (width, 1, channels), param_dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), param_dtype)) if bias else None


class GatedNorm(nnx.Module):
    """RMS norm over a head, times scale [V], times the activated gate; in float32."""

    def __init__(self, dim: int, eps: float, gate: str | None, param_dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), param_dtype))
        self.eps, self.gate = eps, gate

    def __call__(self, o: Array, z: Array) -> Array:
        """o and z: [..., V], z None where there is no gate; the result has o's dtype."""
        x = o.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.scale[...].astype(jnp.float32)
        if self.gate is not None:
            x = x * GATES[self.gate](z.astype(jnp.float32))
        return x.astype(o.dtype)
