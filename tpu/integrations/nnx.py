"""The old name of ``portable_gdn.layers``, which is not for TPUs alone."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_NAMES = ("GatedDeltaNet", "GatedDeltaNet2", "GatedNorm", "KimiDeltaAttention", "ShortConvolution")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("portable_gdn.tpu.integrations.nnx is called portable_gdn.layers now.", DeprecationWarning, 2)
    return getattr(importlib.import_module("portable_gdn.layers"), name)
