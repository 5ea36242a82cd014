"""The file of one request's states: what a pool's slot holds, to be put into a slot of any other pool.

One safetensors file. Tensors: ``recurrent/DTYPE`` [heads, K, V] of the heads that are kept in each dtype, and
``scale/DTYPE`` of the integer ones; ``conv`` [W - 1, channels]; ``window/NAME`` [pending, ...] of tokens that wait.
Metadata, strings: ``format`` and ``version``; ``dtypes``, each head's as JSON; ``state_dtype``, that of the pool;
``sha256`` of the tensors; and ``request``, whatever the caller says of it, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..serving.at_rest import PackedStates, pack, unpack
from ..serving.pool import SlotStates
from ..spec.errors import GdnError, bad
from .run_file import digest
from .tensor_file import TensorFile, TensorWriter

__all__ = ["load_slot", "save_slot"]

FORMAT = "portable-gdn-slot"
VERSION = "1"


def save_slot(
    path: str | Path,
    states: SlotStates,
    *,
    dtypes: str | Sequence[str] | None = None,
    request: Mapping[str, Any] | None = None,
) -> None:
    """Write what ``StatePool.export`` returned, whole or not at all.

    Args:
        dtypes: in which heads' recurrent states are kept (``serving.at_rest``): one for all or one per head; None keeps
            the pool's own, and every bit.
        request: anything of JSON to keep beside them, such as num_computed_tokens and the tokens themselves.

    Raises:
        GdnError: the file cannot be written, or an argument is wrong.
    """
    try:
        said = json.dumps(dict(request or {}))
    except (TypeError, ValueError) as error:
        raise bad("request", "given", f"be what JSON can hold ({error})") from error
    own = states.recurrent.dtype.name
    packed = pack(states.recurrent, own if dtypes is None else dtypes)
    tensors = {f"recurrent/{dtype}": a for dtype, a in packed.parts.items()}
    tensors |= {f"scale/{dtype}": a for dtype, a in packed.scales.items()}
    tensors |= {} if states.conv is None else {"conv": states.conv}
    tensors |= {f"window/{name}": a for name, a in states.window.items()}
    with TensorWriter(Path(path)) as file:
        for name, a in tensors.items():
            file.add(name, a)
        file.metadata = {
            "format": FORMAT, "version": VERSION, "dtypes": json.dumps(packed.dtypes), "state_dtype": own,
            "sha256": digest(tensors), "request": said,
        }  # fmt: skip


def load_slot(path: str | Path) -> tuple[SlotStates, dict[str, Any]]:
    """What ``StatePool.import_`` takes, with the recurrent states in the dtype they had in their pool; and the request.

    Raises:
        GdnError: it is no such file, or was damaged.
    """
    file = TensorFile(path)
    for key, must in (("format", FORMAT), ("version", VERSION)):
        if file.metadata.get(key) != must:
            raise GdnError(f"{path}: metadata {key} is {file.metadata.get(key)!r}; it must be {must!r}.")
    tensors = {name: file.read(name) for name in file.shapes}
    if digest(tensors) != file.metadata.get("sha256"):
        raise GdnError(f"{path}: the tensors do not have the hash that was recorded; the file was damaged or changed.")
    try:
        dtypes, request = json.loads(file.metadata["dtypes"]), json.loads(file.metadata["request"])
        named = {
            kind: {name.removeprefix(kind): a for name, a in tensors.items() if name.startswith(kind)}
            for kind in ("recurrent/", "scale/", "window/")
        }
        recurrent = unpack(PackedStates(tuple(dtypes), named["recurrent/"], named["scale/"]))
        own = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}[file.metadata["state_dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise GdnError(f"{path}: the metadata are not valid ({error}).") from error
    return SlotStates(recurrent.astype(own), tensors.get("conv"), named["window/"]), request
