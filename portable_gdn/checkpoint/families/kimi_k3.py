"""Kimi-K3: KDA with a bounded decay and an output gate of full rank, MLA with an output gate, latent experts in MXFP4.

Names, shapes and dtypes are those of the release's headers as public loaders quote them, formulas those of its own code
and of the servers that run it. The released A_log has as many numbers as a head is wide (128), of which the first
num_heads (96) are the decays; the rest is kept apart, so that it can be written back. The experts, their latent
projections, the attention residuals and the vision tower are carried over as they are: nothing here computes them.
"""

from __future__ import annotations

from .family import CONVS, DENSE, MLA, MODEL, NORMS, Config, Family, Mixer, Rule, entries, shared
from .kimi_linear import KDA_PROJECTIONS, LOW_RANK, ROUTER, kda_dims, kda_mixer, undescribed
from .qwen import text_config

__all__ = ["KIMI_K3"]

LAYER = "model.layers.{i}."

_KDA = {
    **KDA_PROJECTIONS,
    **LOW_RANK,
    "g_proj.weight": "z: Hk R Dv, E",
    **CONVS,
    "A_log": ("A_log: Hk R", "(A_log Hk R | A_log_rest pad)", "A_log: 1, 1, Hk R, 1"),
    "o_proj.weight": "out: E, Hk R Dv",
}
_SPARSE = r"model\.layers\.\d+\.block_sparse_moe\."


def _may_lack(config: Config, layer: int, linear: bool) -> frozenset[str]:
    if layer < 0:
        return frozenset(("A_log_rest",))
    gate = () if text_config(config).get("mla_use_output_gate") else ("mla_gate",)
    return frozenset(gate) | undescribed(text_config(config))


def _mixer(config: Config) -> Mixer:
    return kda_mixer(text_config(config))


KIMI_K3 = Family(
    "kimi_k3",
    "Kimi-K3",
    ("kimi_k3",),
    (
        *entries(_KDA, LAYER + "self_attn.", when="linear"),
        *entries({**MLA, "g_proj.weight": "mla_gate: n, E"}, LAYER + "self_attn.", when="full"),
        *entries(DENSE, LAYER + "mlp."),
        *entries(ROUTER, LAYER + "block_sparse_moe."),
        *entries(shared("shared_experts"), LAYER + "block_sparse_moe."),
        *entries(NORMS, LAYER),
        *entries(MODEL),
    ),
    lambda config: kda_dims(text_config(config)),
    _mixer,
    rules=(
        Rule("experts", _SPARSE + r"experts\..*", tree=True),
        Rule("the experts' latent projections", _SPARSE + r"routed_expert_(down_proj|up_proj|norm)\..*", tree=True),
        Rule(
            "attention residuals",
            r"model\.(layers\.\d+\.(self_attention|mlp)_res|output_attn_res)_(norm|proj)\.weight",
            tree=True,
        ),
        Rule("vision and its projector", r"(model\.)?(vision_tower|mm_projector)\..*"),
        Rule("multi-token prediction", r"(model\.)?mtp\..*"),
    ),
    prefixes=("language_model.model.", "model."),
    may_lack=_may_lack,
    conv_activation=False,
)
