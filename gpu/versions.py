"""The packages that compile kernels: which are missing, and their versions."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata

__all__ = ["PACKAGES", "missing", "versions"]

PACKAGES = {"torch": ("torch",), "triton": ("triton",), "fla": ("flash-linear-attention", "fla-core")}


def missing(modules: Sequence[str] = tuple(PACKAGES)) -> str | None:
    """Return a sentence that names the first of these modules that is not installed, or None."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"{PACKAGES[module][0]} is not installed; `pip install 'portable-gdn[gpu]'` brings it."
    return None


def versions(modules: Sequence[str] = ("triton", "fla")) -> dict[str, str]:
    """Return versions by distribution. FLA is installed as a whole or, without layers and models, as its core only."""
    found = {}
    for module in modules:
        for name in PACKAGES[module]:
            try:
                found[PACKAGES[module][0]] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
