"""The parts of a decoder layer other than attention: norm, dense MLP, mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..layers.axes import named
from ..parallel.axes import AxisRules
from .experts import Experts, expert_split
from .numerics import Numerics
from .settings import ExpertSettings

__all__ = ["MLP", "ChoiceBias", "Experts", "MoE", "Norm", "Numerics", "Router"]

Array = Any


class Norm(nnx.Module):
    """RMS norm over the last axis in float32, times scale [dim], or times 1 + scale if it is zero-centred."""

    def __init__(self, dim: int, eps: float, zero_centred: bool, numerics: Numerics) -> None:
        start = jnp.zeros if zero_centred else jnp.ones
        self.scale = nnx.Param(start((dim,), numerics.param_dtype))
        self.eps, self.zero_centred = eps, zero_centred

    def __call__(self, x: Array) -> Array:
        """Normalise x [..., dim]; the result has its shape and dtype."""
        y, scale = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * (1 + scale if self.zero_centred else scale)).astype(x.dtype)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)): gate_proj and up_proj [E, F], down_proj [F, E]."""

    def __init__(self, hidden_size: int, intermediate_size: int, numerics: Numerics, rngs: nnx.Rngs) -> None:
        rows, columns = ("embed", hidden_size), ("mlp", intermediate_size)
        self.gate_proj = numerics.linear(hidden_size, intermediate_size, rngs, (rows, columns))
        self.up_proj = numerics.linear(hidden_size, intermediate_size, rngs, (rows, columns))
        self.down_proj = numerics.linear(intermediate_size, hidden_size, rngs, (columns, rows))

    def __call__(self, x: Array) -> Array:
        """Apply the MLP to x [..., E]; the result is [..., E]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class ChoiceBias(nnx.Variable[Any]):
    """A bias that is added to an expert's score for the choice of experts only.

    It has no gradient: a training loop adjusts it by the load of each expert.
    """


class Router(nnx.Module):
    """Logits of the experts: kernel [E, X], and bias [X] for the choice only if scores are sigmoids."""

    def __init__(self, hidden_size: int, settings: ExpertSettings, numerics: Numerics, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        kernel = nnx.Param(init(rngs.params(), (hidden_size, settings.count), numerics.param_dtype))
        self.kernel = named(kernel, ("embed", hidden_size), None)
        if settings.scores == "sigmoid":
            self.bias = ChoiceBias(jnp.zeros((settings.count,), jnp.float32))
        self.settings, self.numerics = settings, numerics

    def __call__(self, x: Array) -> Array:
        """Compute the logits [n, X] in float32 from x [n, E]; routers with sigmoids multiply in float32 too."""
        if self.settings.scores == "softmax":
            kernel = self.kernel[...].astype(x.dtype)
            return jnp.dot(x, kernel, precision=self.numerics.precision).astype(jnp.float32)
        x, kernel = x.astype(jnp.float32), self.kernel[...].astype(jnp.float32)
        return jnp.dot(x, kernel, precision=jax.lax.Precision.HIGHEST)


class MoE(nnx.Module):
    """A mixture of experts: each token passes through the experts with the largest scores and a shared expert."""

    def __init__(
        self,
        hidden_size: int,
        settings: ExpertSettings,
        numerics: Numerics,
        rngs: nnx.Rngs,
        mesh: Any = None,
        rules: AxisRules | None = None,
    ) -> None:
        count, size = settings.count, settings.intermediate_size
        self.settings = settings
        self.router = Router(hidden_size, settings, numerics, rngs)
        self.experts = Experts(count, hidden_size, size, numerics, rngs, expert_split(mesh, rules, count, size))
        if settings.shared_size:
            self.shared_expert = MLP(hidden_size, settings.shared_size, numerics, rngs)
            if settings.shared_gate:
                self.shared_expert_gate = numerics.linear(hidden_size, 1, rngs)

    def weights(self, x: Array) -> tuple[Array, Array]:
        """Return the float32 weights [n, k] of each token's experts, and their numbers [n, k], from x [n, E]."""
        s, logits = self.settings, self.router(x)
        if s.scores == "softmax":
            shares = jax.nn.softmax(logits, axis=-1)  # over all, before any is left out
            weights, chosen = jax.lax.top_k(shares, s.per_token)
        else:
            shares = jax.nn.sigmoid(logits)
            rated = shares + jax.lax.stop_gradient(self.router.bias[...].astype(jnp.float32))
            _, chosen = jax.lax.top_k(self._in_groups(rated), s.per_token)
            weights = jnp.take_along_axis(shares, chosen, axis=-1)
        if s.renormalised:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * s.scale, chosen

    def _in_groups(self, rated: Array) -> Array:
        """Set the scores [n, X] of groups that are not chosen to -inf."""
        s = self.settings
        if s.groups == s.groups_used:
            return rated
        groups = rated.reshape(*rated.shape[:-1], s.groups, -1)
        _, used = jax.lax.top_k(jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1), s.groups_used)
        allowed = jnp.any(used[..., None] == jnp.arange(s.groups), axis=-2)  # [n, groups]
        return jnp.where(allowed[..., None], groups, -jnp.inf).reshape(rated.shape)

    def __call__(self, x: Array) -> Array:
        """Apply the mixture to x [B, T, E]; the result is [B, T, E]."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = (a.reshape(*x.shape[:2], -1) for a in self.weights(rows))
        y = self.experts(x, weights, chosen)
        if self.settings.shared_size:
            shared = self.shared_expert(x)
            y = y + (jax.nn.sigmoid(self.shared_expert_gate(x)) * shared if self.settings.shared_gate else shared)
        return y
