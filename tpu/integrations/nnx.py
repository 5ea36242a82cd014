"""Linear-attention layers for Flax NNX: projections, short convolution, gates, the rule, gated norm, output.

Shapes: B rows, T tokens, E hidden, H key heads, HV value heads, K and V their widths, W taps, N states (B, or the
number of packed sequences). Each layer's state is the tree that ``portable-gdn port --to nnx`` writes under
``layers.{i}.mixer``, and ``portable_gdn.checkpoint.load_layer`` makes a layer of it.

    layer = GatedDeltaNet(2048, num_heads=16, num_value_heads=32, key_dim=128, value_dim=128, rngs=nnx.Rngs(0))
    y, state = layer(x, output_final_state=True)     # x [B, T, E]
    y, state = layer.step(x, state)                  # x [B, E]: one token more
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...api import BoundedGate, MixerState, ShortConv, SoftplusGate, gated_delta_mixer, gated_delta_rule_step
from ...spec.errors import bad

__all__ = ["GatedDeltaNet", "GatedDeltaNet2", "GatedNorm", "KimiDeltaAttention", "ShortConvolution"]

Array = Any
_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


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

    def __call__(self, o: Array, z: Array | None) -> Array:
        """o and z: [..., V]; the result has o's dtype."""
        x = o.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.scale[...].astype(jnp.float32)
        if self.gate is not None:
            x = x * _GATES[self.gate](z.astype(jnp.float32))
        return x.astype(o.dtype)


class _Layer(nnx.Module):
    """What the three layers share."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_value_heads: int | None = None,
        key_dim: int,
        value_dim: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate: str | None = "silu",
        norm_eps: float = 1e-6,
        beta_scale: float = 1.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        norm_dtype: Any = jnp.float32,
        projection_precision: Any = None,
        precision: str | None = None,
        backend: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Args:
        hidden_size: E.
        num_heads, num_value_heads: H, and HV (H if None), a multiple of H.
        key_dim, value_dim: K, and V (K if None).
        conv_size: W; 0 is no convolution, silu alone.
        conv_bias: whether the convolutions have biases.
        gate: activation of the output gate, "silu" or "sigmoid"; None is a norm without one (Gated DeltaNet only).
        norm_eps: of the output norm.
        beta_scale: 2 lets the transition have negative eigenvalues.
        dtype: of the computation; None is that of input and weights.
        param_dtype, norm_dtype: of weights, and of the output norm's scale. A_log and dt_bias are float32 always.
        projection_precision: of the projections' products (``jax.lax.Precision``). On a TPU None rounds float32 to
            bfloat16 there.
        precision, backend: as in ``gated_delta_rule``.
        rngs: for the initial weights.
        """
        hv, v = num_value_heads or num_heads, value_dim or key_dim
        if hv % num_heads:
            raise bad("num_value_heads", hv, f"be a multiple of num_heads = {num_heads}")
        if gate is not None and gate not in _GATES:
            raise bad("gate", repr(gate), f"be None or one of {', '.join(_GATES)}")
        self.hidden_size, self.num_heads, self.num_value_heads, self.key_dim, self.value_dim = (
            hidden_size, num_heads, hv, key_dim, v,
        )  # fmt: skip
        self.conv_size, self.beta_scale, self.precision, self.backend = conv_size, beta_scale, precision, backend
        self._linear = {"dtype": dtype, "param_dtype": param_dtype, "precision": projection_precision}
        keys, values = num_heads * key_dim, hv * v
        self.q_proj = self._project(hidden_size, keys, rngs)
        self.k_proj = self._project(hidden_size, keys, rngs)
        self.v_proj = self._project(hidden_size, values, rngs)
        if conv_size:
            self.q_conv1d = ShortConvolution(keys, conv_size, conv_bias, param_dtype, rngs)
            self.k_conv1d = ShortConvolution(keys, conv_size, conv_bias, param_dtype, rngs)
            self.v_conv1d = ShortConvolution(values, conv_size, conv_bias, param_dtype, rngs)
        self.o_norm = GatedNorm(v, norm_eps, gate, norm_dtype)
        self.o_proj = self._project(values, hidden_size, rngs)

    def _project(self, inside: int, out: int, rngs: nnx.Rngs, bias: bool = False) -> nnx.Linear:
        return nnx.Linear(inside, out, use_bias=bias, rngs=rngs, **self._linear)

    def _decay_parameters(self, heads: int, channels: int, rngs: nnx.Rngs) -> None:
        """A_log [heads] and dt_bias [heads * channels] as the models' authors start them."""
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)))
        span = jax.random.uniform(rngs.params(), (heads * channels,), jnp.float32, jnp.log(1e-3), jnp.log(0.1))
        dt = jnp.maximum(jnp.exp(span), 1e-4)
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))

    def _conv(self) -> ShortConv:
        channels = 2 * self.num_heads * self.key_dim + self.num_value_heads * self.value_dim
        if not self.conv_size:
            return ShortConv(jnp.ones((channels, 1), jnp.float32))  # y = silu(x)
        parts = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = jnp.concatenate([p.kernel[...][:, 0] for p in parts], axis=-1).T
        biases = [p.bias for p in parts]
        return ShortConv(weight, None if biases[0] is None else jnp.concatenate([b[...] for b in biases]))

    def _gates(self, x: Array) -> dict[str, Array]:
        """What the rule needs beside q, k and v, from x [..., E]."""
        raise NotImplementedError

    def _z(self, x: Array) -> Array | None:
        """The output gate before its activation, [..., HV * V]."""
        raise NotImplementedError

    def __call__(
        self,
        x: Array,
        *,
        state: MixerState | None = None,
        output_final_state: bool = False,
        cu_seqlens: Array | None = None,
        segment_ids: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, MixerState | None]:
        """Whole sequences.

        Args:
            x: [B, T, E].
            state: where to go on from; None is the start. recurrent [N, HV, K, V] float32, conv [N, W - 1, channels].
            output_final_state: whether to return the state after the last token.
            cu_seqlens: [N + 1], boundaries of packed sequences (then B = 1).
            segment_ids: [B, T]; the state starts anew where the id changes.
            mask: [B, T]; tokens that are False change nothing.

        Returns:
            y [B, T, E], and the state or None.
        """
        qkv = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        o, state = gated_delta_mixer(
            qkv,
            conv=self._conv(),
            num_heads=self.num_heads,
            state=state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            segment_ids=segment_ids,
            mask=mask,
            precision=self.precision,
            backend=self.backend,
            **self._gates(x),
        )
        return self._output(o, x), state

    def step(self, x: Array, state: MixerState) -> tuple[Array, MixerState]:
        """One token, for decoding.

        Args:
            x: [B, E].
            state: as ``__call__`` returned it.

        Returns:
            y [B, E], and the new state.
        """
        new = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        conv = self._conv()
        seen = jnp.concatenate([state.conv.astype(new.dtype), new[:, None]], axis=1)  # [B, W, channels]
        y = jnp.einsum("bwc,cw->bc", seen.astype(jnp.float32), conv.weight.astype(jnp.float32), precision="highest")
        y = jax.nn.silu(y if conv.bias is None else y + conv.bias.astype(jnp.float32))
        keys = self.num_heads * self.key_dim
        q, k, v = jnp.split(y, [keys, 2 * keys], axis=-1)
        o, recurrent = gated_delta_rule_step(
            q.reshape(-1, self.num_heads, self.key_dim),
            k.reshape(-1, self.num_heads, self.key_dim),
            v.reshape(-1, self.num_value_heads, self.value_dim),
            state=state.recurrent,
            qk_l2norm=True,
            precision=self.precision,
            backend=self.backend,
            **self._gates(x),
        )
        return self._output(o.astype(new.dtype), x), MixerState(recurrent, seen[:, 1:].astype(state.conv.dtype))

    def _output(self, o: Array, x: Array) -> Array:
        z = self._z(x)
        o = self.o_norm(o, None if z is None else z.reshape(o.shape))
        return self.o_proj(o.reshape(*o.shape[:-2], -1))

    def _beta(self, x: Array) -> Array:
        return self.beta_scale * jax.nn.sigmoid(x.astype(jnp.float32))

    def _heads(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:-1], heads, -1)


class GatedDeltaNet(_Layer):
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid, FLA): one decay and one beta a value head.

    State beside what all layers have (q_proj, k_proj, v_proj, o_proj, the convolutions, o_norm):
    a_proj.kernel [E, HV], b_proj.kernel [E, HV], g_proj.kernel [E, HV * V] (unless gate is None), A_log and dt_bias
    [HV].
    """

    def __init__(self, hidden_size: int, *, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(hidden_size, rngs=rngs, **options)
        self.a_proj = self._project(hidden_size, self.num_value_heads, rngs)
        self.b_proj = self._project(hidden_size, self.num_value_heads, rngs)
        if self.o_norm.gate is not None:
            self.g_proj = self._project(hidden_size, self.num_value_heads * self.value_dim, rngs)
        self._decay_parameters(self.num_value_heads, 1, rngs)

    def _gates(self, x: Array) -> dict[str, Array]:
        gate = SoftplusGate(self.A_log[...], self.dt_bias[...])
        return {"g": self.a_proj(x), "beta": self._beta(self.b_proj(x)), "gate": gate}

    def _z(self, x: Array) -> Array | None:
        return None if self.o_norm.gate is None else self.g_proj(x)


class _LowRank(_Layer):
    """The gates of KDA and GDN-2: two factors each, or one matrix."""

    def _gate_projections(
        self, decays: int, gate_rank: int | None, decay_rank: int | None, gate_bias: bool, rngs: nnx.Rngs
    ) -> None:
        E, values = self.hidden_size, self.num_value_heads * self.value_dim
        self.decay_rank, self.gate_rank = decay_rank, gate_rank
        if decay_rank is None:
            self.f_proj = self._project(E, decays, rngs)
        else:
            self.f_a_proj = self._project(E, decay_rank, rngs)
            self.f_b_proj = self._project(decay_rank, decays, rngs)
        if gate_rank is None:
            self.g_proj = self._project(E, values, rngs, gate_bias)
        else:
            self.g_a_proj = self._project(E, gate_rank, rngs)
            self.g_b_proj = self._project(gate_rank, values, rngs, gate_bias)

    def _f(self, x: Array) -> Array:
        return self.f_proj(x) if self.decay_rank is None else self.f_b_proj(self.f_a_proj(x))

    def _z(self, x: Array) -> Array:
        return self.g_proj(x) if self.gate_rank is None else self.g_b_proj(self.g_a_proj(x))


class KimiDeltaAttention(_LowRank):
    """Kimi Delta Attention (Kimi-Linear, Ling-3.0, GLM-5, FLA): a decay a key channel of each value head.

    State beside what all layers have: b_proj.kernel [E, HV], f_a_proj.kernel [E, r] and f_b_proj.kernel [r, HV * K] (or
    f_proj.kernel [E, HV * K] where ``decay_rank`` is None), g_a_proj and g_b_proj alike for [E, HV * V] (g_b_proj.bias
    if ``gate_bias``), A_log [HV], dt_bias [HV * K]. ``lower_bound`` makes the decay the bounded one.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        gate: str = "sigmoid",
        norm_eps: float = 1e-5,
        lower_bound: float | None = None,
        decay_rank: int | None,
        gate_rank: int | None,
        gate_bias: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, gate=gate, norm_eps=norm_eps, rngs=rngs, **options)
        self.lower_bound = lower_bound
        self.b_proj = self._project(hidden_size, self.num_value_heads, rngs)
        self._gate_projections(self.num_value_heads * self.key_dim, gate_rank, decay_rank, gate_bias, rngs)
        self._decay_parameters(self.num_value_heads, self.key_dim, rngs)

    def _gates(self, x: Array) -> dict[str, Array]:
        A, bias = self.A_log[...], self.dt_bias[...]
        gate = SoftplusGate(A, bias) if self.lower_bound is None else BoundedGate(A, bias, self.lower_bound)
        return {
            "g": self._heads(self._f(x), self.num_value_heads), "beta": self._beta(self.b_proj(x)), "gate": gate,
        }  # fmt: skip


class GatedDeltaNet2(_LowRank):
    """Gated DeltaNet 2 (FLA): erase and write gates a channel, decays and erase gates shared by the value heads of a
    key head.

    State beside what all layers have: b_proj.kernel [E, H * K] (erase), w_proj.kernel [E, HV * V] (write),
    f_a_proj.kernel [E, r], f_b_proj.kernel [r, H * K], g_a_proj.kernel [E, s], g_b_proj.kernel [s, HV * V] and .bias,
    A_log [H], dt_bias [H * K].
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        gate: str = "sigmoid",
        norm_eps: float = 1e-5,
        decay_rank: int | None,
        gate_rank: int | None,
        gate_bias: bool = True,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, gate=gate, norm_eps=norm_eps, rngs=rngs, **options)
        keys = self.num_heads * self.key_dim
        self.b_proj = self._project(hidden_size, keys, rngs)
        self.w_proj = self._project(hidden_size, self.num_value_heads * self.value_dim, rngs)
        self._gate_projections(keys, gate_rank, decay_rank, gate_bias, rngs)
        self._decay_parameters(self.num_heads, self.key_dim, rngs)

    def _gates(self, x: Array) -> dict[str, Array]:
        shared = self.num_value_heads // self.num_heads
        repeat = lambda a, axis: jnp.repeat(a, shared, axis=axis)  # noqa: E731
        bias = self.dt_bias[...].reshape(self.num_heads, self.key_dim)
        return {
            "g": repeat(self._heads(self._f(x), self.num_heads), -2),
            "erase": repeat(self._beta(self._heads(self.b_proj(x), self.num_heads)), -2),
            "write": jax.nn.sigmoid(self._heads(self.w_proj(x), self.num_value_heads).astype(jnp.float32)),
            "gate": SoftplusGate(repeat(self.A_log[...], 0), repeat(bias, 0).reshape(-1)),
        }
