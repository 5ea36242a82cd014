"""Qwen3-Next and Qwen3.5 to 3.8: gated attention with partial rotary positions, zero-centred norms, softmax routers."""

from __future__ import annotations

from ...spec.errors import bad
from ..settings import AttentionSettings, DecoderSettings, ExpertSettings
from .rotary import rotary
from .source import Source

__all__ = ["qwen"]


def qwen(source: Source) -> DecoderSettings:
    """The settings of a port of this family."""
    linear = source.linear()
    dense = tuple(_is_dense(source, i) for i in range(len(linear)))
    source.refuse("hidden_act", ("silu", "swish"), "no other activation is computed here")
    if source.text.get("attention_bias"):
        raise bad("config.json's attention_bias", "true", "be false: no biases are known of these families")
    eps = source.get("rms_norm_eps", default=1e-6)
    return source.decoder(
        dense,
        norm_eps=eps,
        zero_centred=True,
        attention=None if all(linear) else _attention(source, eps),
        experts=None if all(dense) else _experts(source, dense),
    )


def _is_dense(source: Source, number: int) -> bool:
    text = source.text
    every = text.get("decoder_sparse_step", 1)
    experts = number not in (text.get("mlp_only_layers") or ()) and (number + 1) % every == 0
    return not (text.get("num_experts") and experts)


def _attention(source: Source, eps: float) -> AttentionSettings:
    heads = source.count("num_attention_heads")
    dim = source.get("head_dim") or source.count("hidden_size") // heads
    channels, theta = rotary(source, dim, 0.25)
    return AttentionSettings(
        num_heads=heads,
        num_kv_heads=source.get("num_key_value_heads") or heads,
        head_dim=dim,
        rotary_dim=channels,
        rope_theta=theta,
        gated=True,
        qk_norm="head",
        norm_eps=eps,
    )


def _experts(source: Source, dense: tuple[bool, ...]) -> ExpertSettings:
    count, chosen = source.count("num_experts"), source.count("num_experts_per_tok")
    if chosen > count:
        raise bad("config.json's num_experts_per_tok", chosen, f"be at most num_experts = {count}")
    # Qwen3.5 has no such switch: transformers always divides, whatever a file says.
    renormalised = source.facts["family"] != "qwen3_next" or source.text.get("norm_topk_prob", True) is not False
    return ExpertSettings(
        count=count,
        per_token=chosen,
        intermediate_size=source.mlp_size(dense, False, "experts.gate_proj", 2),
        shared_size=source.mlp_size(dense, False, "shared_expert.gate_proj.kernel", 1),
        shared_gate=True,
        renormalised=renormalised,
    )
