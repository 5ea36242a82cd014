"""What joins other libraries to our call: models of transformers and MaxText, and torch tensors that torchax made of
JAX arrays."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MODELS", "patch_maxtext", "patch_torchax", "patch_transformers"]

_WHERE = {
    "MODELS": "transformers",
    "patch_transformers": "transformers",
    "patch_maxtext": "maxtext",
    "patch_torchax": "torchax_patch",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
