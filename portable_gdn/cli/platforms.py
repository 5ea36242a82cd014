"""Keeps libtpu from looking for a TPU on a machine that has none: that takes seconds and prints ten lines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["settle"]

#: The number by which the PCI bus knows Google as a vendor; every generation of TPUs has it.
_GOOGLE = "0x1ae0"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin", "jax_plugins")


def settle(environment: MutableMapping[str, str] = os.environ, bus: Path = Path("/sys/bus/pci/devices")) -> None:
    """Set JAX_PLATFORMS to "cpu" where libtpu is installed and the machine has neither a TPU nor a plugin of JAX for
    another accelerator. Leave it alone where the user has set it, and where the bus cannot be read.
    """
    if "JAX_PLATFORMS" in environment or not bus.is_dir() or importlib.util.find_spec("libtpu") is None:
        return
    if any(importlib.util.find_spec(name) is not None for name in _PLUGINS):
        return
    if not any(_vendor(device) == _GOOGLE for device in bus.iterdir()):
        environment["JAX_PLATFORMS"] = "cpu"


def _vendor(device: Path) -> str:
    try:
        return (device / "vendor").read_text().strip()
    except OSError:
        return _GOOGLE  # it cannot be told
