"""Write trained weights into a port, so that the way back writes them in the original checkpoint's format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..checkpoint import provenance
from ..checkpoint.dtypes import dtype_of
from ..checkpoint.reader import Checkpoint
from ..checkpoint.targets import ROOTS
from ..spec.errors import GdnError, bad
from .decoder import Decoder
from .loading import read_settings

__all__ = ["save_model"]


def save_model(model: Decoder, port: str | Path, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Replace the weights in a port's files by those of a model that was loaded from it.

    Each tensor keeps its name, its place and its dtype in the file. Parts that the model does not run (vision towers,
    multi-token prediction) remain unchanged. All new files are written before any old one is replaced, so the disk
    needs room for both, and nothing is lost if writing fails or is interrupted. ``portable-gdn port PORT OUT
    --back`` then writes the checkpoint in the format that it came from.

    Args:
        model: The model that ``load_model`` returned for this port, after training; it may be on a mesh.
        port: The folder of a port that was made with ``--to jax``.
        progress: Called with the file that is written, the bytes written before it, and those of all files.

    Raises:
        GdnError: The folder is not such a port, or the model's parameters differ from the port's.
        OSError: The files cannot be written.
    """
    folder = Path(port)
    _, leaves = read_settings(folder)
    facts = provenance.load(folder)
    if facts["target"] in ROOTS:
        raise bad(str(folder), f"a port to {facts['target']}", "be one to jax; Orbax itself saves such a model's state")
    weights = model.leaves()
    have = {name: leaf.shape for name, leaf in weights.items()}
    want = {name: leaf.shape for name, leaf in leaves.items()}
    if have != want:
        name = next(name for name in {**want, **have} if have.get(name) != want.get(name))
        raise GdnError(
            f"{name} is {_shape(have.get(name))} in the model and {_shape(want.get(name))} in {folder}; "
            f"the model must be one that was loaded from this port."
        )
    found = provenance.open_port(folder, facts, side=False)
    parts = {file: path.with_name(f"{path.name}.part") for file, path in found.files.items()}
    done = 0
    try:
        for file, part in parts.items():
            if progress is not None:
                progress(file, done, found.nbytes)
            with part.open("wb") as out:
                out.write(found.headers[file].raw)
                for data in _tensors(found, file, weights):
                    done += out.write(data)
        for file, part in parts.items():
            os.replace(part, found.files[file])
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _tensors(found: Checkpoint, file: str, weights: Mapping[str, Any]) -> Iterator[memoryview]:
    """Yield the bytes of a file's tensors in order, from the model for those that it has."""
    for name, tensor in found.headers[file].tensors.items():
        if name in weights:
            array = np.asarray(jax.device_get(weights[name])).astype(dtype_of(tensor.dtype))
        else:
            array = found.array(name)
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"
