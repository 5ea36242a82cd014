"""Lightning attention for Flax NNX: GLA with a fixed decay per head, as in Ling-2.6.

Per token and head, with the state S [K, K] in float32 and slope s > 0:

    S = exp(-s) S + k v^T;    o = K ** -0.5 S^T q

Before that, q and k are normalised over the head and receive rotary position embeddings. Afterwards, o is normalised
over groups of heads, multiplied by the sigmoid of a gate, and projected. If H is a power of two, the slope of head h of
H in layer i of n (both numbered from 0) is 2 ** (-8 (h + 1) / H) (1 - (i - 1) / (n - 1) + 1e-5); for other H, see
``slopes``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..api import gated_delta_rule, gated_delta_rule_step
from ..spec.errors import bad, suggests_keywords
from .axes import named_linear
from .explicit import Projection
from .inputs import as_input

__all__ = ["LightningAttention", "LightningState", "slopes"]

Array = Any


def slopes(heads: int, layer: int, layers: int) -> np.ndarray:
    """Return the slope of each head [heads] in float32; the state is multiplied by exp(-slope) at each token.

    Args:
        heads: The number of heads.
        layer: The number of this layer, from 0.
        layers: The number of layers of the model, with all kinds of attention.
    """

    def steps(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]

    power = 2 ** int(math.log2(heads))
    found = steps(power) + steps(2 * power)[0::2][: heads - power]
    return np.asarray(np.array(found) * (1 - (layer - 1) / max(layers - 1, 1) + 1e-5), np.float32)


class LightningState(NamedTuple):
    """The state: recurrent [B, H, K, K] in float32, and position [B] in int32, the tokens of each row so far."""

    recurrent: Array
    position: Array


class _Scale(nnx.Module):
    """An RMS norm with a scale over the last axis, of which ``groups`` parts are normalised separately; in float32."""

    def __init__(self, size: int, eps: float, groups: int, param_dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps, self.groups = eps, groups

    def __call__(self, x: Array) -> Array:
        """x: [..., size]; the result is float32."""
        parts = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1)
        parts = parts * jax.lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + self.eps)
        return parts.reshape(x.shape) * self.scale[...].astype(jnp.float32)


class LightningAttention(nnx.Module):
    """A layer of lightning attention.

    Parameters: q_proj, k_proj, v_proj, g_proj .kernel [E, H * K], o_proj.kernel [H * K, E], g_norm.scale [H * K], and
    q_norm.scale, k_norm.scale [K] if ``qk_norm``.
    """

    @suggests_keywords
    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        layer: int,
        layers: int,
        rotary_dim: int,
        rope_theta: float,
        norm_groups: int,
        norm_eps: float = 1e-6,
        qk_norm: bool = True,
        gate: str = "sigmoid",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        norm_dtype: Any = jnp.float32,
        projection_precision: Any = None,
        precision: str | None = None,
        backend: str | None = None,
        sharding: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Args:
        hidden_size: E.
        num_heads, head_dim: H and K.
        layer, layers: The number of this layer, from 0, and of the model's layers; they determine the decay.
        rotary_dim, rope_theta: The rotary embedding applies to the first ``rotary_dim`` channels of q and k, and
            pairs the channels of their first and second halves.
        norm_groups: The number of parts of H * K that the output norm normalises separately.
        norm_eps: The epsilon of all norms.
        qk_norm: Whether q and k are normalised.
        gate: The activation of the output gate; "sigmoid".
        dtype, param_dtype, norm_dtype, projection_precision, precision, backend, sharding: As in
            ``GatedDeltaNet``.
        rngs: Random numbers for the initial weights.
        """
        if gate != "sigmoid":
            raise bad("gate", repr(gate), "be 'sigmoid'")
        if not 0 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise bad("rotary_dim", rotary_dim, f"be an even number up to head_dim = {head_dim}")
        if norm_groups < 1 or (num_heads * head_dim) % norm_groups:
            raise bad("norm_groups", norm_groups, f"divide num_heads * head_dim = {num_heads * head_dim}")
        self.hidden_size = hidden_size
        self.num_heads, self.head_dim, self.layer, self.layers = num_heads, head_dim, layer, layers
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.precision, self.backend, self.sharding = precision, backend, sharding
        linear = {"dtype": dtype, "param_dtype": param_dtype, "precision": projection_precision, "use_bias": False}
        size = num_heads * head_dim
        embed, heads = ("embed", hidden_size), ("heads", num_heads)
        self.q_proj = named_linear(Projection(hidden_size, size, rngs=rngs, **linear), embed, heads)
        self.k_proj = named_linear(Projection(hidden_size, size, rngs=rngs, **linear), embed, heads)
        self.v_proj = named_linear(Projection(hidden_size, size, rngs=rngs, **linear), embed, heads)
        self.g_proj = named_linear(Projection(hidden_size, size, rngs=rngs, **linear), embed, heads)
        self.o_proj = named_linear(Projection(size, hidden_size, rngs=rngs, **linear), heads, embed)
        if qk_norm:
            self.q_norm = _Scale(head_dim, norm_eps, 1, norm_dtype)
            self.k_norm = _Scale(head_dim, norm_eps, 1, norm_dtype)
        self.qk_norm = qk_norm
        self.g_norm = _Scale(size, norm_eps, norm_groups, norm_dtype)

    def init_state(self, batch: int) -> LightningState:
        """Return the state before the first token of ``batch`` rows."""
        H, K = self.num_heads, self.head_dim
        return LightningState(jnp.zeros((batch, H, K, K), jnp.float32), jnp.zeros((batch,), jnp.int32))

    def _qkv(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Compute q, k, v [..., H, K] from x [..., E], with rotary embeddings for positions [...]."""
        heads = lambda t: t.reshape(*t.shape[:-1], self.num_heads, self.head_dim)  # noqa: E731
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        dtype = v.dtype
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self._turned(q, positions).astype(dtype), self._turned(k, positions).astype(dtype), v

    def _turned(self, x: Array, positions: Array) -> Array:
        half = self.rotary_dim // 2
        if not half:
            return x
        rates = self.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angle = positions[..., None, None].astype(jnp.float32) * jnp.asarray(rates, jnp.float32)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        x = x.astype(jnp.float32)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def _decay(self, shape: tuple[int, ...]) -> Array:
        return jnp.broadcast_to(-slopes(self.num_heads, self.layer, self.layers), (*shape, self.num_heads))

    def _output(self, o: Array, x: Array) -> Array:
        o = self.g_norm(o.reshape(*o.shape[:-2], -1)) * jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32))
        return self.o_proj(o.astype(x.dtype))

    def __call__(
        self,
        x: Array,
        *,
        state: LightningState | None = None,
        output_final_state: bool = False,
        mask: Array | None = None,
    ) -> tuple[Array, LightningState | None]:
        """Apply the layer to whole sequences.

        Args:
            x: [B, T, E].
            state: The initial state; None is the start of a sequence.
            output_final_state: Whether to return the state after the last token.
            mask: [B, T]; tokens with False do not change the state, and have no position.

        Returns:
            y [B, T, E], and the state or None.
        """
        x = as_input(x, "B, T", self.hidden_size, "`step` takes one token a row, [B, E]")
        start = self.init_state(x.shape[0]) if state is None else state
        counted = jnp.ones(x.shape[:2], jnp.int32) if mask is None else jnp.asarray(mask).astype(jnp.int32)
        positions = start.position[:, None] + jnp.cumsum(counted, axis=1) - counted
        q, k, v = self._qkv(x, positions)
        o, recurrent = gated_delta_rule(
            q,
            k,
            v,
            self._decay(x.shape[:2]),
            initial_state=None if state is None else start.recurrent,
            output_final_state=output_final_state,
            mask=mask,
            precision=self.precision,
            backend=self.backend,
            sharding=self.sharding,
        )
        after = LightningState(recurrent, start.position + counted.sum(axis=1)) if output_final_state else None
        return self._output(o, x), after

    def step(self, x: Array, state: LightningState | None = None) -> tuple[Array, LightningState]:
        """Apply the layer to one token per row, for decoding.

        Args:
            x: [B, E].
            state: A state from ``__call__``, ``step`` or ``init_state``; None is the start of a sequence.

        Returns:
            y [B, E], and the new state.
        """
        x = as_input(x, "B", self.hidden_size, "call the layer for whole sequences, [B, T, E]")
        state = self.init_state(x.shape[0]) if state is None else state
        q, k, v = self._qkv(x, state.position)
        o, recurrent = gated_delta_rule_step(
            q,
            k,
            v,
            self._decay(x.shape[:1]),
            state=state.recurrent,
            precision=self.precision,
            backend=self.backend,
            sharding=self.sharding,
        )
        return self._output(o, x), LightningState(recurrent, state.position + 1)
