"""Gated DeltaNet: one decay and one beta per value head."""

from __future__ import annotations

from typing import Any, Unpack

from flax import nnx

from ..api import SoftplusGate
from .layer import Layer
from .options import LayerOptions, checked_options

__all__ = ["GatedDeltaNet"]

Array = Any


class GatedDeltaNet(Layer):
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid, FLA): one decay and one beta per value head.

    Parameters in addition to those of every layer (q_proj, k_proj, v_proj, o_proj, the convolutions, o_norm):
    a_proj.kernel [E, HV], b_proj.kernel [E, HV], g_proj.kernel [E, HV * V] (unless gate is None), A_log and dt_bias
    [HV].
    """

    variant = "GDN"

    @checked_options
    def __init__(
        self,
        hidden_size: int,
        *,
        gate: str | None = "silu",
        norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
        **options: Unpack[LayerOptions],
    ) -> None:
        """Args:
        hidden_size: E.
        gate: The activation of the output gate, "silu" or "sigmoid"; None is an output norm without a gate.
        norm_eps: The epsilon of the output norm.
        rngs: Random numbers for the initial weights.
        options: The options that all layers have, see ``LayerOptions``; num_heads and key_dim are required.
        """
        super().__init__(hidden_size, gate=gate, norm_eps=norm_eps, rngs=rngs, options=options)
        self.a_proj = self._by_heads(self.num_value_heads, rngs)
        self.b_proj = self._by_heads(self.num_value_heads, rngs)
        if gate is not None:
            self.g_proj = self._by_heads(self.num_value_heads * self.value_dim, rngs)
        self._decay_parameters(self.num_value_heads, 1, rngs)

    def _gates(self, x: Array) -> dict[str, Any]:
        gate = SoftplusGate(self.A_log[...], self.dt_bias[...])
        return {"g": self.a_proj(x), "beta": self._beta(self.b_proj(x)), "gate": gate}

    def _z(self, x: Array) -> Array | None:
        return None if self.o_norm.gate is None else self.g_proj(x)
