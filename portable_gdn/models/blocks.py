"""The parts of a decoder layer beside its attention: norm, dense MLP, mixture of experts."""

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
    """RMS norm over the last axis, in float32, times scale [dim], or 1 + scale where it is zero-centred."""

    def __init__(self, dim: int, eps: float, zero_centred: bool, numerics: Numerics) -> None:
        start = jnp.zeros if zero_centred else jnp.ones
        self.scale = nnx.Param(start((dim,), numerics.param_dtype))
        self.eps, self.zero_centred = eps, zero_centred

    def __call__(self, x: Array) -> Array:
        """x [..., dim]; the result has its shape and dtype."""
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
        """x [..., E] to [..., E]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class ChoiceBias(nnx.Variable[Any]):
    """What is added to an expert's score where experts are chosen, and nowhere else. It has no gradient: who trains it
    moves it by how busy an expert is."""


class Router(nnx.Module):
    """Logits of the experts: kernel [E, X], and where scores are sigmoids, bias [X], for the choice alone."""

    def __init__(self, hidden_size: int, settings: ExpertSettings, numerics: Numerics, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        kernel = nnx.Param(init(rngs.params(), (hidden_size, settings.count), numerics.param_dtype))
        self.kernel = named(kernel, ("embed", hidden_size), None)
        if settings.scores == "sigmoid":
            self.bias = ChoiceBias(jnp.zeros((settings.count,), jnp.float32))
        self.settings, self.numerics = settings, numerics

    def __call__(self, x: Array) -> Array:
        """x [n, E] to float32 [n, X]; the product of routers with sigmoids is float32, too."""
        if self.settings.scores == "softmax":
            kernel = self.kernel[...].astype(x.dtype)
            return jnp.dot(x, kernel, precision=self.numerics.precision).astype(jnp.float32)
        x, kernel = x.astype(jnp.float32), self.kernel[...].astype(jnp.float32)
        return jnp.dot(x, kernel, precision=jax.lax.Precision.HIGHEST)


class MoE(nnx.Module):
    """Each token through the experts that the router gives most to, and through one that all tokens share."""

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
        """x [n, E] to what each token gives its experts, float32 [n, k], and their numbers [n, k]."""
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
        """Scores [n, X], those of groups that are not used -inf."""
        s = self.settings
        if s.groups == s.groups_used:
            return rated
        groups = rated.reshape(*rated.shape[:-1], s.groups, -1)
        _, used = jax.lax.top_k(jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1), s.groups_used)
        allowed = jnp.any(used[..., None] == jnp.arange(s.groups), axis=-2)  # [n, groups]
        return jnp.where(allowed[..., None], groups, -jnp.inf).reshape(rated.shape)

    def __call__(self, x: Array) -> Array:
        """x [B, T, E] to [B, T, E]."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = (a.reshape(*x.shape[:2], -1) for a in self.weights(rows))
        y = self.experts(x, weights, chosen)
        if self.settings.shared_size:
            shared = self.shared_expert(x)
            y = y + (jax.nn.sigmoid(self.shared_expert_gate(x)) * shared if self.settings.shared_gate else shared)
        return y
