"""The cases that the quick proof runs on a backend: all, unless the backend needs seconds for each new shape."""

from __future__ import annotations

from ..spec.backend import Backend
from .cases import Case

__all__ = ["LISTED", "in_quick_proof"]

#: The cases for the interpreted backends; each takes a path through their kernels that the others do not.
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
    """Return whether the quick proof runs this case on this backend.

    It runs the cases listed for the backend, if there are any; only the essential ones if it is slow; otherwise all.
    """
    listed = LISTED.get(backend.name)
    if listed is not None:
        return case.name in listed
    return case.essential or not backend.slow
