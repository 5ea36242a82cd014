"""Which cases the quick proof runs on which backend: all of them, unless each new shape costs the backend seconds."""

from __future__ import annotations

from ..spec.backend import Backend
from .cases import Case

__all__ = ["LISTED", "in_quick_proof"]

#: Cases of the interpreted backends, each of which takes a path of their kernels that the others do not.
LISTED = {
    "fla-interpret": (
        "no tokens", "DeltaNet", "bfloat16, 64 x 96", "gates one -inf",
        "packed with empties", "left padding", "step", "kimi_linear layer, continued", "qwen3_next layer",
        "softplus gate, KDA", "GLA", "GLA, scalar gate", "mixer, norm and silu gate",
    ),
    "pallas-interpret": (
        "no tokens", "DeltaNet", "a chunk", "KDA", "GDN-2", "GLA",
        "bfloat16, 64 x 96", "gates one -inf", "one key, beta 1.998, bfloat16",
        "packed with empties", "left padding", "mixer, norm and silu gate", "qwen3_next layer",
    ),
}  # fmt: skip


def in_quick_proof(backend: Backend, case: Case) -> bool:
    """Whether the quick proof runs this case on this backend: those listed for it, or, if it is slow, the essential."""
    listed = LISTED.get(backend.name)
    if listed is not None:
        return case.name in listed
    return case.essential or not backend.slow
