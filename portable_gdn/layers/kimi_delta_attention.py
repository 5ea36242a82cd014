"""Kimi Delta Attention: one decay per key channel of each value head."""

from __future__ import annotations

from typing import Any, Unpack

from flax import nnx

from ..api import BoundedGate, SoftplusGate
from .low_rank import LowRankLayer
from .options import LayerOptions, checked_options

__all__ = ["KimiDeltaAttention"]

Array = Any


class KimiDeltaAttention(LowRankLayer):
    """Kimi Delta Attention (Kimi-Linear, Ling-3.0, GLM-5, FLA): one decay per key channel of each value head.

    Parameters in addition to those of every layer: b_proj.kernel [E, HV], f_a_proj.kernel [E, r] and f_b_proj.kernel
    [r, HV * K] (or f_proj.kernel [E, HV * K] if ``decay_rank`` is None), g_a_proj and g_b_proj likewise for [E, HV * V]
    (with g_b_proj.bias if ``gate_bias``), A_log [HV], dt_bias [HV * K].
    """

    variant = "KDA"

    @checked_options
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
        **options: Unpack[LayerOptions],
    ) -> None:
        """Args:
        hidden_size: E.
        gate: The activation of the output gate, "sigmoid" or "silu".
        norm_eps: The epsilon of the output norm.
        lower_bound: Selects the bounded decay, lower_bound * sigmoid(...); None is the decay by softplus.
        decay_rank, gate_rank: The inner width of the two-factor projections for the decays and the output gate;
            None uses one matrix.
        gate_bias: Whether the output gate's projection has a bias.
        rngs: Random numbers for the initial weights.
        options: The options that all layers have, see ``LayerOptions``; num_heads and key_dim are required.
        """
        super().__init__(hidden_size, gate=gate, norm_eps=norm_eps, rngs=rngs, options=options)
        self.lower_bound = lower_bound
        self.b_proj = self._by_heads(self.num_value_heads, rngs)
        self._gate_projections(self.num_value_heads * self.key_dim, gate_rank, decay_rank, gate_bias, rngs)
        self._decay_parameters(self.num_value_heads, self.key_dim, rngs)

    def _gates(self, x: Array) -> dict[str, Any]:
        A, bias = self.A_log[...], self.dt_bias[...]
        gate = SoftplusGate(A, bias) if self.lower_bound is None else BoundedGate(A, bias, self.lower_bound)
        decays = self._heads(self._decays(x), self.num_value_heads)
        return {"g": decays, "beta": self._beta(self.b_proj(x)), "gate": gate}
