"""What compiles kernels here: what of it is missing, and its versions."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata

__all__ = ["PACKAGES", "missing", "versions"]

PACKAGES = {"torch": ("torch",), "triton": ("triton",), "fla": ("flash-linear-attention", "fla-core")}


def missing(modules: Sequence[str] = tuple(PACKAGES)) -> str | None:
    """The first of these modules that is not installed, as a sentence."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"{PACKAGES[module][0]} is not installed; `pip install 'portable-gdn[gpu]'` brings it."
    return None


def versions(modules: Sequence[str] = ("triton", "fla")) -> dict[str, str]:
    """Versions by distribution; FLA comes as one package or, without layers and models, as its core alone."""
    found = {}
    for module in modules:
        for name in PACKAGES[module]:
            try:
                found[PACKAGES[module][0]] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
