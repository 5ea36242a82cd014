"""What joins other libraries to our call: models of transformers, and torch tensors that torchax made of JAX arrays."""

from __future__ import annotations

from typing import Any

__all__ = ["MODELS", "patch_transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
