"""The projections for the decays and the output gate of KDA and GDN-2, each of two low-rank factors or one matrix."""

from __future__ import annotations

from typing import Any

from flax import nnx

from .axes import named_linear
from .layer import Layer

__all__ = ["LowRankLayer"]

Array = Any


class LowRankLayer(Layer):
    """A layer whose decays are projected by f_a_proj and f_b_proj (or f_proj), and its output gate by g_a_proj and
    g_b_proj (or g_proj)."""

    def _gate_projections(
        self,
        decays: int,
        gate_rank: int | None,
        decay_rank: int | None,
        gate_bias: bool,
        rngs: nnx.Rngs,
        keys: bool = False,
    ) -> None:
        """Make the projections for ``decays`` decays, per value head or per key head, and for the output gate."""
        E, values = self.hidden_size, self.num_value_heads * self.value_dim
        self.decay_rank, self.gate_rank = decay_rank, gate_rank
        if decay_rank is None:
            self.f_proj = self._by_heads(decays, rngs, keys=keys)
        else:
            heads = ("key_heads", self.num_heads) if keys else ("heads", self.num_value_heads)
            self.f_a_proj = named_linear(self._project(E, decay_rank, rngs), ("embed", E), None)
            self.f_b_proj = named_linear(self._project(decay_rank, decays, rngs), None, heads)
        if gate_rank is None:
            self.g_proj = self._by_heads(values, rngs, gate_bias)
        else:
            self.g_a_proj = named_linear(self._project(E, gate_rank, rngs), ("embed", E), None)
            g_b_proj = self._project(gate_rank, values, rngs, gate_bias)
            self.g_b_proj = named_linear(g_b_proj, None, ("heads", self.num_value_heads))

    def _decays(self, x: Array) -> Array:
        """Compute the raw projection of the decays from x [..., E]."""
        return self.f_proj(x) if self.decay_rank is None else self.f_b_proj(self.f_a_proj(x))

    def _z(self, x: Array) -> Array:
        return self.g_proj(x) if self.gate_rank is None else self.g_b_proj(self.g_a_proj(x))
