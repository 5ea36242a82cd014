"""Which library and configuration serve a call of FLA: pinned where bits must not change, and recorded."""

from __future__ import annotations

import os

__all__ = ["OTHER_LIBRARIES", "without_other_libraries"]

#: What switches off each library to which FLA hands calls without a word, where it is installed.
OTHER_LIBRARIES = ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG", "FLA_INTRACARD_CP")


def without_other_libraries() -> None:
    """Keep FLA to its own Triton kernels, in this process; before it is imported."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    for name in OTHER_LIBRARIES:
        os.environ[name] = "0"
