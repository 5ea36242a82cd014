"""portable-gdn: one gated delta rule on GPU and TPU, and the proof that they agree.

Importing this package imports numpy and nothing else that is large; torch and jax are imported by whoever uses them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        Batch,
        BoundedGate,
        GatedRMSNorm,
        MixerState,
        RuleStates,
        ShortConv,
        SoftplusGate,
        StatePool,
        explain,
        gated_delta_mixer,
        gated_delta_mixer_step,
        gated_delta_mixer_update,
        gated_delta_rule,
        gated_delta_rule_step,
        gated_delta_rule_update,
        state_pool,
    )
    from .dispatch import register_backend
    from .parallel.sharding import Sharding
    from .spec.backend import Backend
    from .spec.errors import GdnError
    from .spec.precision import Rounding
    from .spec.problem import Problem, Result, Signature
    from .watching import watch

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        (
            "Batch",
            "BoundedGate",
            "GatedRMSNorm",
            "MixerState",
            "RuleStates",
            "ShortConv",
            "SoftplusGate",
            "StatePool",
            "explain",
            "gated_delta_mixer",
            "gated_delta_mixer_step",
            "gated_delta_mixer_update",
            "gated_delta_rule",
            "gated_delta_rule_step",
            "gated_delta_rule_update",
            "state_pool",
        ),
        "api",
    ),
    "register_backend": "dispatch",
    "Backend": "spec.backend",
    "GdnError": "spec.errors",
    "Rounding": "spec.precision",
    **dict.fromkeys(("Problem", "Result", "Signature"), "spec.problem"),
    "Sharding": "parallel.sharding",
    "watch": "watching",
}

__all__ = [
    "Backend",
    "Batch",
    "BoundedGate",
    "GatedRMSNorm",
    "GdnError",
    "MixerState",
    "Problem",
    "Result",
    "Rounding",
    "RuleStates",
    "Sharding",
    "ShortConv",
    "Signature",
    "SoftplusGate",
    "StatePool",
    "__version__",
    "explain",
    "gated_delta_mixer",
    "gated_delta_mixer_step",
    "gated_delta_mixer_update",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_delta_rule_update",
    "register_backend",
    "state_pool",
    "watch",
]


#: Packages that ``import portable_gdn`` leaves to whoever names them.
_PACKAGES = ("checkpoint", "gpu", "harness", "integrations", "layers", "models", "ops", "parallel", "tpu")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        import difflib

        close = difflib.get_close_matches(name, [*__all__, *_PACKAGES], 1)
        guess = f"; did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
        raise AttributeError(f"module 'portable_gdn' has no attribute {name!r}{guess}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
