"""One table a model family; ``ALL`` in the order in which an unknown checkpoint is tried."""

from __future__ import annotations

from .bailing_gla import BAILING_GLA
from .family import Family, Mixer, Rule
from .fla import GATED_DELTANET, GATED_DELTANET2, KDA
from .kimi_k3 import KIMI_K3
from .kimi_linear import KIMI_LINEAR
from .olmo_hybrid import OLMO_HYBRID
from .others import BAILING_HYBRID, GLM5_NEXT, LARA_MINI, QWEN4_EXP
from .qwen import QWEN3_5, QWEN3_NEXT
from .qwen import VISION as _VISION

__all__ = ["ALL", "VISION", "Family", "Mixer", "Rule", "families_of", "family_named"]

ALL: tuple[Family, ...] = (
    QWEN3_NEXT, QWEN3_5, KIMI_LINEAR, OLMO_HYBRID, GATED_DELTANET, KDA, GATED_DELTANET2,
    BAILING_HYBRID, GLM5_NEXT, LARA_MINI, QWEN4_EXP, KIMI_K3, BAILING_GLA,
)  # fmt: skip


VISION = _VISION.name
"""The rule by which vision towers are carried over."""


def families_of(model_type: str) -> tuple[Family, ...]:
    """The families whose config.json has that model_type: two that their tensors tell apart may share one."""
    return tuple(family for family in ALL if model_type in (family.name, *family.model_types))


def family_named(name: str) -> Family | None:
    """The family of that name or model_type, or None."""
    for family in ALL:
        if name == family.name or name in family.model_types:
            return family
    return None
