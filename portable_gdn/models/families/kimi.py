"""Kimi-Linear: latent attention without positions, sigmoid routers with a bias for the choice, a dense first layer."""

from __future__ import annotations

from ...spec.errors import bad
from ..settings import DecoderSettings, ExpertSettings, LatentSettings
from .source import Source

__all__ = ["kimi"]


def kimi(source: Source) -> DecoderSettings:
    """The settings of a port of this family."""
    linear = source.linear()
    dense = _dense(source, len(linear))
    source.refuse("hidden_act", ("silu", "swish"), "no other activation is computed here")
    source.refuse("mla_use_nope", (True,), "positions in latent attention are not computed here")
    if source.text.get("attention_bias"):
        raise bad("config.json's attention_bias", "true", "be false: no biases are known of this family")
    return source.decoder(
        dense,
        norm_eps=source.get("rms_norm_eps", default=source.facts["mixer"]["norm_eps"]),
        zero_centred=False,
        attention=None if all(linear) else _attention(source),
        experts=None if all(dense) else _experts(source, dense),
    )


def _dense(source: Source, layers: int) -> tuple[bool, ...]:
    source.refuse("moe_layer_freq", (1,), "layers between mixtures are known to be none")
    kinds = source.text.get("mlp_layer_types")
    if kinds is not None:
        return tuple(kind == "dense" for kind in kinds)
    first = source.get("first_k_dense_replace", default=1)
    return tuple(number < first or not source.get("num_experts", "num_local_experts") for number in range(layers))


def _attention(source: Source) -> LatentSettings:
    return LatentSettings(
        num_heads=source.count("num_attention_heads"),
        plain_dim=source.count("qk_nope_head_dim"),
        shared_dim=source.count("qk_rope_head_dim"),
        value_dim=source.count("v_head_dim"),
        rank=source.count("kv_lora_rank"),
        query_rank=source.get("q_lora_rank"),
        norm_eps=1e-6,  # of these norms alone, whatever rms_norm_eps is
    )


def _experts(source: Source, dense: tuple[bool, ...]) -> ExpertSettings:
    source.refuse("moe_router_activation_func", ("sigmoid",), "no other router is known of this family")
    count = source.count("num_experts", "num_local_experts")
    chosen = source.count("num_experts_per_token", "num_experts_per_tok")
    groups = source.get("num_expert_group", "n_group", default=1)
    used = source.get("topk_group", default=1)
    if count % groups or used > groups or chosen > used * (count // groups):
        raise bad(
            "config.json's num_expert_group", groups, f"divide num_experts = {count}, and its topk_group = {used} "
            f"groups must hold num_experts_per_token = {chosen}",
        )  # fmt: skip
    if groups > 1 and count // groups < 2:
        raise bad("config.json's num_expert_group", groups, "leave each group two experts, by which it is rated")
    shared = f"layers.{dense.index(False)}.mlp.shared_expert.gate_proj.kernel"
    return ExpertSettings(
        count=count,
        per_token=chosen,
        intermediate_size=source.mlp_size(dense, False, "experts.gate_proj", 2),
        shared_size=source.size(shared, 1) if shared in source.shapes else 0,
        shared_gate=False,
        renormalised=source.get("moe_renormalize", "norm_topk_prob", default=True),
        scores="sigmoid",
        groups=groups,
        groups_used=used,
        scale=source.number("routed_scaling_factor", source.get("routed_scaling_factor", default=2.446)),
    )
