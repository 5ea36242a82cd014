"""The parts of a layer that have weights, apart from its projections."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..spec.norm import ACTIVATIONS, GatedRMSNorm, gated_norm

__all__ = ["GATES", "GatedNorm", "ShortConvolution"]

Array = Any
GATES = ACTIVATIONS


class ShortConvolution(nnx.Module):
    """Weights of a causal depthwise convolution: kernel [W, 1, channels] (as nnx.Conv has it), bias [channels] or
    None."""

    def __init__(self, channels: int, width: int, bias: bool, param_dtype: Any, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", in_axis=0, out_axis=2)
        self.kernel = nnx.Param(init(rngs.params(), (width, 1, channels), param_dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), param_dtype)) if bias else None


class GatedNorm(nnx.Module):
    """RMS norm over a head, times scale [V], times the activation of the gate; computed in float32."""

    def __init__(self, dim: int, eps: float, gate: str | None, param_dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), param_dtype))
        self.eps, self.gate = eps, gate

    def __call__(self, o: Array, z: Array) -> Array:
        """Apply the norm to o [..., V] with the gate z [..., V], or None without one; the result has o's dtype."""
        gate = None if self.gate is None else z.astype(jnp.float32)
        weight = self.scale[...].astype(jnp.float32)
        return gated_norm(jnp, o.astype(jnp.float32), weight, gate, self.eps, self.gate).astype(o.dtype)

    def as_option(self) -> GatedRMSNorm:
        """Return this norm as the ``output_norm`` of ``gated_delta_mixer``."""
        return GatedRMSNorm(self.scale[...], self.eps, self.gate)
