"""Modules that have moved: their old names go on working, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["moved"]


def moved(old: str, new: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that finds its names in another one.

        __getattr__ = moved(__name__, "portable_gdn.layers")

    Args:
        old: the module's own name.
        new: where its contents are now.
    """

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old} is called {new} now.", DeprecationWarning, stacklevel=2)
        return value

    return get
