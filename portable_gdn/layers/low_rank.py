"""The decay and output gates of KDA and GDN-2: two factors each, or one matrix."""

from __future__ import annotations

from typing import Any

from flax import nnx

from .layer import Layer

__all__ = ["LowRankLayer"]

Array = Any


class LowRankLayer(Layer):
    """A layer whose decays come by f_a_proj and f_b_proj (or f_proj), and whose output gate by g_a_proj and g_b_proj
    (or g_proj)."""

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

    def _decays(self, x: Array) -> Array:
        """The raw projection of the decays, from x [..., E]."""
        return self.f_proj(x) if self.decay_rank is None else self.f_b_proj(self.f_a_proj(x))

    def _z(self, x: Array) -> Array:
        return self.g_proj(x) if self.gate_rank is None else self.g_b_proj(self.g_a_proj(x))
