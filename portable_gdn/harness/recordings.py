"""Recorded operands and results of the gated delta rule inside real model layers.

A recording is one safetensors file of little-endian float32 arrays, batch size 1, made by
``portable_gdn.harness.capture``. With H key heads, HV value heads (HV a multiple of H; value head ``h`` uses
key head ``h // (HV // H)``), key head size K, value head size V and T tokens:

==========  ==========================================  ==================================================
array       shape                                       meaning
==========  ==========================================  ==================================================
``q, k``    [1, T, H, K]                                queries and keys, not scaled; not normalised when
                                                        the metadata says ``qk_l2norm = "true"``
``v``       [1, T, HV, V]                               values
``g``       [1, T, HV] (gdn) or [1, T, HV, K] (kda)     natural logarithm of the decay, <= 0
``beta``    [1, T, HV]                                  write strength
``o``       [1, T, HV, V]                               the output of the layer's own torch code
``state``   [1, HV, K, V]                               its state after the last token
==========  ==========================================  ==================================================

The arrays named ``step_...`` belong to a second call: the last tokens of the text, continued from a cache of the tokens
before them. ``step_initial_state`` [1, HV, K, V] is the state that was passed to the rule.

This module reads the format with numpy alone, so that tests need neither torch nor safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..spec.errors import GdnError
from .tensor_file import TensorFile

__all__ = ["FORMAT", "VERSION", "Recording", "bundled", "load"]

FORMAT = "portable-gdn-activations"
VERSION = "1"

_METADATA = (
    "format", "version", "model", "layer", "variant", "qk_l2norm", "scale", "transformers", "torch",
    "text_sha256", "seed", "tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """One recording: float32 arrays by name (the module's docstring has their shapes) and metadata as strings."""

    arrays: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def bundled() -> list[Path]:
    """Return the paths of the recordings that come with the package, sorted by name."""
    return sorted((Path(__file__).parent / "data").glob("*.safetensors"))


def load(path: str | Path) -> Recording:
    """Read and check one recording.

    Args:
        path: a safetensors file in the format of the module's docstring.

    Returns:
        The recording, with writable arrays that the caller owns.

    Raises:
        GdnError: the file cannot be read, is not such a recording, or its arrays do not fit together.
    """
    path = Path(path)
    arrays, metadata = _read(path)
    for key, must in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(key) != must:
            raise GdnError(f"{path}: metadata {key} is {metadata.get(key)!r}; it must be {must!r}.")
    absent = [key for key in _METADATA if key not in metadata]
    if absent:
        raise GdnError(f"{path}: the metadata lacks {', '.join(absent)}.")
    _check_metadata(path, metadata)

    sizes = _check_call(path, arrays, metadata["variant"], "")
    if sizes["T"] != int(metadata["tokens"]):
        raise GdnError(f"{path}: q has {sizes['T']} tokens; the metadata says {metadata['tokens']}.")
    step = _check_call(path, arrays, metadata["variant"], "step_")
    for axis in ("H", "HV", "K", "V"):
        if step[axis] != sizes[axis]:
            raise GdnError(f"{path}: {axis} is {sizes[axis]} in the first call and {step[axis]} in step_.")
    return Recording(arrays, metadata)


def _check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Check the metadata that readers use in computations."""
    for key, allowed in (("variant", ("gdn", "kda")), ("qk_l2norm", ("true", "false"))):
        if metadata[key] not in allowed:
            raise GdnError(f"{path}: metadata {key} is {metadata[key]!r}; it must be one of {allowed}.")
    for key, number in (("scale", float), ("tokens", int)):
        try:
            good = 0 < number(metadata[key]) < math.inf
        except (ValueError, TypeError):
            good = False
        if not good:
            raise GdnError(f"{path}: metadata {key} is {metadata[key]!r}; it must be a positive number.")


def _check_call(path: Path, arrays: Mapping[str, np.ndarray], variant: str, prefix: str) -> dict[str, int]:
    """Check the names, shapes and values of one call's arrays; return the sizes T, H, HV, K and V."""
    layout = {
        "q": "1 T H K", "k": "1 T H K", "v": "1 T HV V",
        "g": "1 T HV" if variant == "gdn" else "1 T HV K", "beta": "1 T HV",
        "o": "1 T HV V", "state": "1 HV K V",
    }  # fmt: skip
    if prefix:
        layout["initial_state"] = "1 HV K V"
    sizes = {"1": 1}
    for name, axes in layout.items():
        name = prefix + name
        if name not in arrays:
            raise GdnError(f"{path}: tensor {name} is missing.")
        shape = arrays[name].shape
        if len(shape) != len(axes.split()):
            raise GdnError(f"{path}: tensor {name} has shape {shape}; it must be [{axes}].")
        # The first tensor with an axis sets the size of that axis, and every later one must agree.
        must = tuple(sizes.setdefault(axis, size) for axis, size in zip(axes.split(), shape, strict=True))
        if shape != must:
            raise GdnError(f"{path}: tensor {name} has shape {shape}; it must be [{axes}] = {must}.")
        if not np.isfinite(arrays[name]).all():
            raise GdnError(f"{path}: tensor {name} has values that are not finite.")
    if 0 in sizes.values():
        raise GdnError(f"{path}: an axis of tensor {prefix}q or {prefix}v is empty.")
    if sizes["HV"] % sizes["H"]:
        raise GdnError(
            f"{path}: {prefix}v has {sizes['HV']} heads; it must be a multiple of the {sizes['H']} heads of {prefix}q."
        )
    if (arrays[prefix + "g"] > 0).any():
        raise GdnError(f"{path}: tensor {prefix}g has positive values; a log decay must be <= 0.")
    return sizes


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the float32 tensors of a safetensors file, and its metadata."""
    file = TensorFile(path)
    arrays = {name: file.read(name) for name in file.shapes}
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise GdnError(f"{path}: tensor {name} has dtype {array.dtype}; it must be float32.")
    return arrays, file.metadata
