"""Gated DeltaNet 2: erase and write gates per channel."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from ..api import SoftplusGate
from .explicit import repeated
from .low_rank import LowRankLayer
from .options import LayerOptions, checked_options

__all__ = ["GatedDeltaNet2"]

Array = Any


class GatedDeltaNet2(LowRankLayer):
    """Gated DeltaNet 2 (FLA): erase and write gates per channel; the value heads of a key head share its decays and
    erase gates.

    Parameters in addition to those of every layer: b_proj.kernel [E, H * K] (erase), w_proj.kernel [E, HV * V] (write),
    f_a_proj.kernel [E, r], f_b_proj.kernel [r, H * K], g_a_proj.kernel [E, s], g_b_proj.kernel [s, HV * V] and .bias,
    A_log [H], dt_bias [H * K].
    """

    variant = "GDN-2"

    @checked_options
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
        **options: Unpack[LayerOptions],
    ) -> None:
        """Args:
        hidden_size: E.
        gate: The activation of the output gate, "sigmoid" or "silu".
        norm_eps: The epsilon of the output norm.
        decay_rank, gate_rank: The inner width of the two-factor projections for the decays and the output gate;
            None uses one matrix.
        gate_bias: Whether the output gate's projection has a bias.
        rngs: Random numbers for the initial weights.
        options: The options that all layers have, see ``LayerOptions``; num_heads and key_dim are required.
        """
        super().__init__(hidden_size, gate=gate, norm_eps=norm_eps, rngs=rngs, options=options)
        keys = self.num_heads * self.key_dim
        self.b_proj = self._by_heads(keys, rngs, keys=True)
        self.w_proj = self._by_heads(self.num_value_heads * self.value_dim, rngs)
        self._gate_projections(keys, gate_rank, decay_rank, gate_bias, rngs, keys=True)
        self._decay_parameters(self.num_heads, self.key_dim, rngs, keys=True)

    def _gates(self, x: Array) -> dict[str, Any]:
        shared = self.num_value_heads // self.num_heads
        repeat = lambda a, axis: repeated(a, shared, axis)  # noqa: E731
        bias = self.dt_bias[...].reshape(self.num_heads, self.key_dim)
        # Activated as projections write them: by head they would lie otherwise in a TPU's memory, and be copied.
        erase, write = self._beta(self.b_proj(x)), jax.nn.sigmoid(self.w_proj(x).astype(jnp.float32))
        return {
            "g": repeat(self._heads(self._decays(x), self.num_heads), -2),
            "erase": repeat(self._heads(erase, self.num_heads), -2),
            "write": self._heads(write, self.num_value_heads),
            "gate": SoftplusGate(repeat(self.A_log[...], 0), repeat(bias, 0).reshape(-1)),
        }
