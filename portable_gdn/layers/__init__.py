"""Linear-attention layers for Flax NNX, on any device: projections, short convolution, gates, the rule, gated norm.

    from flax import nnx
    import jax.numpy as jnp
    from portable_gdn.layers import GatedDeltaNet

    layer = GatedDeltaNet(256, num_heads=2, num_value_heads=4, key_dim=64, value_dim=64, rngs=nnx.Rngs(0))
    y, state = layer(jnp.ones((1, 16, 256)), output_final_state=True)  # whole sequences: x [B, T, E]
    y, state = layer.step(jnp.ones((1, 256)), state)                   # one token more: x [B, E]

A layer's parameters are the tree that ``portable-gdn port --to nnx`` writes under ``layers.{i}.mixer``, and
``portable_gdn.checkpoint.load_layer`` makes a layer of it.
"""

from __future__ import annotations

from .axes import partition_specs
from .gated_delta_net import GatedDeltaNet
from .gated_delta_net2 import GatedDeltaNet2
from .kimi_delta_attention import KimiDeltaAttention
from .lightning_attention import LightningAttention
from .parts import GatedNorm, ShortConvolution

__all__ = [
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedNorm",
    "KimiDeltaAttention",
    "LightningAttention",
    "ShortConvolution",
    "partition_specs",
]
