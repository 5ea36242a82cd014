"""The base class of the linear-attention layers.

Shapes: B rows, T tokens, hidden size E, H key heads, HV value heads, K key and V value channels per head, W taps of the
convolution, N states (B, or the number of packed sequences).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..api import (
    Batch,
    MixerState,
    ShortConv,
    StatePool,
    gated_delta_mixer,
    gated_delta_mixer_step,
    gated_delta_mixer_update,
    state_pool,
)
from ..spec.errors import bad
from .axes import named, named_linear
from .explicit import Projection, with_whole_channels
from .inputs import as_input
from .options import LayerOptions
from .parts import GATES, GatedNorm, ShortConvolution

__all__ = ["Layer"]

Array = Any


class Layer(nnx.Module):
    """Projections, convolution, the rule, output norm and output gate; each subclass defines the gates of its rule."""

    #: The rule's variant, by its published name.
    variant: str

    def __init__(
        self, hidden_size: int, *, gate: str | None, norm_eps: float, rngs: nnx.Rngs, options: LayerOptions
    ) -> None:
        H, K = options["num_heads"], options["key_dim"]
        HV, V = options.get("num_value_heads") or H, options.get("value_dim") or K
        if HV % H:
            raise bad("num_value_heads", HV, f"be a multiple of num_heads = {H}")
        if gate is not None and gate not in GATES:
            raise bad("gate", repr(gate), f"be None or one of {', '.join(GATES)}")
        self.hidden_size, self.num_heads, self.num_value_heads, self.key_dim, self.value_dim = hidden_size, H, HV, K, V
        self.conv_size, self.beta_scale = options.get("conv_size", 4), options.get("beta_scale", 1.0)
        self.precision, self.backend = options.get("precision"), options.get("backend")
        self.sharding = options.get("sharding")
        weights = options.get("param_dtype", jnp.float32)
        # A tuple, since a dict would make the module's graph unhashable.
        linear = {"dtype": options.get("dtype"), "param_dtype": weights}
        self._linear = (*linear.items(), ("precision", options.get("projection_precision")))
        self.q_proj = self._by_heads(H * K, rngs, keys=True)
        self.k_proj = self._by_heads(H * K, rngs, keys=True)
        self.v_proj = self._by_heads(HV * V, rngs)
        if self.conv_size:
            bias = options.get("conv_bias", False)
            self.q_conv1d = ShortConvolution(H * K, self.conv_size, bias, weights, rngs)
            self.k_conv1d = ShortConvolution(H * K, self.conv_size, bias, weights, rngs)
            self.v_conv1d = ShortConvolution(HV * V, self.conv_size, bias, weights, rngs)
        self.o_norm = GatedNorm(V, norm_eps, gate, options.get("norm_dtype", jnp.float32))
        self.o_proj = named_linear(self._project(HV * V, hidden_size, rngs), ("heads", HV), ("embed", hidden_size))

    def _project(self, inside: int, out: int, rngs: nnx.Rngs, bias: bool = False) -> Projection:
        return Projection(inside, out, use_bias=bias, rngs=rngs, **dict(self._linear))

    def _by_heads(self, out: int, rngs: nnx.Rngs, bias: bool = False, keys: bool = False) -> Projection:
        """Make a projection of x whose columns belong to value heads or to key heads."""
        heads = ("key_heads", self.num_heads) if keys else ("heads", self.num_value_heads)
        return named_linear(self._project(self.hidden_size, out, rngs, bias), ("embed", self.hidden_size), heads)

    def _decay_parameters(self, heads: int, channels: int, rngs: nnx.Rngs, keys: bool = False) -> None:
        """Make A_log [heads] and dt_bias [heads * channels], initialised as by the models' authors.

        ``keys``: whether the heads are key heads.
        """
        axis = ("key_heads" if keys else "heads", heads)
        A_log = jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0))
        self.A_log = named(nnx.Param(A_log), axis)
        span = jax.random.uniform(rngs.params(), (heads * channels,), jnp.float32, jnp.log(1e-3), jnp.log(0.1))
        dt = jnp.maximum(jnp.exp(span), 1e-4)
        self.dt_bias = named(nnx.Param(dt + jnp.log(-jnp.expm1(-dt))), axis)

    @property
    def _channels(self) -> int:
        """The number of channels of the convolution: those of q, k and v."""
        return 2 * self.num_heads * self.key_dim + self.num_value_heads * self.value_dim

    def _conv(self) -> ShortConv:
        if not self.conv_size:
            return ShortConv(jnp.ones((self._channels, 1), jnp.float32))  # y = silu(x)
        parts = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = jnp.concatenate([with_whole_channels(p.kernel[...][:, 0]) for p in parts], axis=-1).T
        biases = [with_whole_channels(p.bias[...]) for p in parts if p.bias is not None]
        return ShortConv(weight, jnp.concatenate(biases) if biases else None)

    def _gates(self, x: Array) -> dict[str, Any]:
        """Compute the gates that the rule needs in addition to q, k and v, from x [..., E]."""
        raise NotImplementedError

    def _z(self, x: Array) -> Array | None:
        """Compute the output gate before its activation, [..., HV * V]."""
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
        """Apply the layer to whole sequences.

        Args:
            x: [B, T, E].
            state: The initial state, recurrent [N, HV, K, V] in float32 and conv [N, W - 1, channels]; None is zeros.
            output_final_state: Whether to return the state after the last token.
            cu_seqlens: [N + 1], the boundaries of packed sequences (then B = 1).
            segment_ids: [B, T]; the state is reset wherever the id changes.
            mask: [B, T]; tokens with False do not change the state.

        Returns:
            y [B, T, E], and the state or None.

        Raises:
            GdnError: x has another shape, or ``gated_delta_mixer`` refuses the call.
        """
        x = as_input(x, "B, T", self.hidden_size, "`step` takes one token a row, [B, E]")
        o, state = gated_delta_mixer(
            **self.mixer_arguments(x),
            state=state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            segment_ids=segment_ids,
            mask=mask,
        )
        return self._projected(o), state

    def init_state(self, batch: int) -> MixerState:
        """Return the state before the first token of ``batch`` rows: zeros in recurrent [batch, HV, K, V] and conv
        [batch, W - 1, channels], both in float32, as ``__call__`` and ``step`` return them."""
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
            raise bad("batch", repr(batch), "be a number of rows")
        recurrent = (batch, self.num_value_heads, self.key_dim, self.value_dim)
        conv = (batch, max(self.conv_size, 1) - 1, self._channels)
        return MixerState(jnp.zeros(recurrent, jnp.float32), jnp.zeros(conv, jnp.float32))

    def step(self, x: Array, state: MixerState | None = None) -> tuple[Array, MixerState]:
        """Apply the layer to one token per row, for decoding.

        Args:
            x: [B, E].
            state: A state from ``__call__``, ``step`` or ``init_state``; None is the start of a sequence.

        Returns:
            y [B, E], and the new state.

        Raises:
            GdnError: x or state has another shape.
        """
        x = as_input(x, "B", self.hidden_size, "call the layer for whole sequences, [B, T, E]")
        o, state = gated_delta_mixer_step(**self.mixer_arguments(x), state=self._checked(state, x.shape[0]))
        return self._projected(o), state

    def init_pool(
        self, num_slots: int, *, window: int = 0, dtype: str = "float32", state_dtype: str = "float32"
    ) -> StatePool:
        """Make a pool of zero states for ``update``.

        Args:
            num_slots: The number of requests that the pool can hold plus 1, because slot 0 is the null slot.
            window: The number of tokens that can wait in a slot: the drafts of a step plus 1, or 0 without drafts.
            dtype: The dtype of the projections of q, k and v.
            state_dtype: The dtype in which recurrent states are stored.
        """
        return state_pool(
            num_slots,
            library="jax",
            num_heads=self.num_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            state_dtype=state_dtype,
            conv_width=max(self.conv_size, 1),
            window=window,
            variant=self.variant,
        )

    def update(
        self,
        x: Array,
        pool: StatePool,
        batch: Batch,
        *,
        window: int | None = None,
        checkpoint_every: int | None = None,
    ) -> tuple[Array, StatePool]:
        """Apply the layer to tokens of many requests, for serving; see ``gated_delta_mixer_update``.

        Args:
            x: [T, E], the tokens of all rows, one row after another.
            pool: The states. The update reuses their memory.
            batch: The rows.
            window, checkpoint_every: As in ``gated_delta_mixer_update``.

        Returns:
            y [T, E], 0 at padding, and the pool.

        Raises:
            GdnError: x has another shape, the layer is split over a mesh, or the call is refused.
        """
        x = as_input(x, "T", self.hidden_size, "an update takes ragged tokens without an axis of rows")
        arguments = self.mixer_arguments(x)
        if arguments.pop("sharding") is not None:
            raise bad("sharding", "given to this layer", "be None for an update; call it inside jax.shard_map instead")
        o, pool = gated_delta_mixer_update(
            **arguments, pool=pool, batch=batch, window=window, checkpoint_every=checkpoint_every
        )
        return self._projected(o), pool

    def _checked(self, state: MixerState | None, batch: int) -> MixerState | None:
        """Check a state for ``step``; its parts may be None."""
        if state is None:
            return None
        if not (isinstance(state, tuple) and len(state) == 2):
            raise bad("state", f"a {type(state).__name__}", "be None or a MixerState(recurrent, conv)")
        shapes: tuple[Array, ...] = jax.eval_shape(lambda: self.init_state(batch))
        for name, given, must in zip(MixerState._fields, state, shapes, strict=True):
            if given is not None and tuple(given.shape) != must.shape:
                was, want = (", ".join(map(str, a.shape)) for a in (given, must))
                raise bad(f"state.{name}", f"of shape [{was}]", f"have shape [{want}]")
        return MixerState(*state)

    def mixer_arguments(self, x: Array) -> dict[str, Any]:
        """Compute the arguments of a mixer from x [..., E], except for its states."""
        return {
            "qkv": (self.q_proj(x), self.k_proj(x), self.v_proj(x)),
            "conv": self._conv(),
            "num_heads": self.num_heads,
            "output_norm": self.o_norm.as_option(),
            "z": self._z(x),
            "precision": self.precision,
            "backend": self.backend,
            "sharding": self.sharding,
            **self._gates(x),
        }

    def _projected(self, o: Array) -> Array:
        return self.o_proj(o.reshape(*o.shape[:-2], -1))

    def _beta(self, x: Array) -> Array:
        return self.beta_scale * jax.nn.sigmoid(x.astype(jnp.float32))

    def _heads(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:-1], heads, -1)
