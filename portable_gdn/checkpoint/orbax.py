"""Orbax checkpoints, written and read as files: every leaf a zarr3 array, the tree in JSON beside them.

A leaf is one file of a zarr3 array with a sharding codec: its elements in order, uncompressed, then an index of parts.
So a leaf of any size is streamed, can be mapped into memory, and is read by Orbax in parts, as a device's sharding asks
for them.
What Orbax itself writes differs in that it keeps arrays in a database (OCDBT) unless told otherwise; it reads both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from ..spec.errors import GdnError
from .dtypes import dtype_of, itemsize
from .header import Tensor
from .output import Output, Shard
from .reader import Checkpoint, read_json
from .table import Spec

__all__ = ["Leaves", "leaf", "metadata"]

_PART = 64 * 2**20  # bytes of a part, about: what a reader must read at once
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_HANDLER_V1 = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def _rows(spec: Spec) -> int:
    """Rows of the first axis that a part has: a divisor, since zarr's parts are all alike."""
    rows, size = spec.shape[0], prod(spec.shape) * itemsize(spec.dtype)
    most = max(1, rows * _PART // max(size, 1))
    return next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)


def leaf(output: Output, root: str) -> Shard:
    """The file of a leaf, under ``root`` in the checkpoint."""
    spec = output.spec
    parts = spec.shape[0] // _rows(spec) if spec.shape else 1
    each = output.nbytes // parts
    index = np.array([[n * each, each] for n in range(parts)], "<u8").tobytes()
    place = "/".join(["c", *["0"] * len(spec.shape)])
    return Shard(f"{root}/{output.name}/{place}", b"", (output,), trailer=index)


def _array(spec: Spec) -> str:
    """zarr.json of a leaf."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    shape = list(spec.shape)
    codec = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [_rows(spec), *shape[1:]] if shape else [],
            "codecs": [little],
            "index_codecs": [little],
            "index_location": "end",
        },
    }
    dtype = dtype_of(spec.dtype)
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": False if dtype.kind == "b" else 0 if dtype.kind in "iu" else 0.0,
            "codecs": [codec],
        }
    )


def metadata(outputs: Sequence[Output], root: str, empty: Sequence[str] = ()) -> dict[str, str]:
    """Every other file of the checkpoint, by path: each leaf's zarr.json, the tree, and the marks of a finished save.

    ``empty`` are nodes of the tree that hold nothing. A root without a step ("state") is the new API's form.
    """
    files = {f"{root}/{output.name}/zarr.json": _array(output.spec) for output in outputs}
    tree = {}
    for name, shape in [(o.name, list(o.spec.shape)) for o in outputs] + [(name, None) for name in empty]:
        path = name.split(".")
        value = {"value_type": "Dict", "skip_deserialize": True}
        if shape is not None:
            value = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": shape}
        tree[str(tuple(path))] = {"key_metadata": [{"key": p, "key_type": 2} for p in path], "value_metadata": value}
    files[f"{root}/_METADATA"] = json.dumps(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )
    now = time.time_ns()
    top = "" if root == "state" else root + "/"
    files[f"{top}_CHECKPOINT_METADATA"] = json.dumps(
        {
            "item_handlers": {"state": _HANDLER_V1} if root == "state" else _HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": {},
        }
    )
    files[f"{top}commit_success.txt"] = "Checkpoint commit was successful"
    if root == "state":
        files["orbax.checkpoint"] = ""
    return files


class Leaves(Checkpoint):
    """The leaves of such a checkpoint, as ``Checkpoint`` has tensors; the side files of a port beside them.

    Only arrays of the form that ``leaf`` writes are read: what Orbax itself saved must first be loaded by Orbax.
    """

    def __init__(self, folder: Path, root: str, side: list[str], specs: Mapping[str, Spec]) -> None:
        """Open the leaves of these names, dtypes and shapes.

        Raises:
            GdnError: a leaf is not there or of another form, dtype or shape.
        """
        where: dict[str, tuple[str, Tensor]] = {}
        files: dict[str, Path] = {}
        for name, spec in specs.items():
            shard = leaf(Output(name, spec), root)
            described = read_json(folder / root / name / "zarr.json")
            if described != json.loads(_array(spec)):
                raise GdnError(
                    f"{folder / root / name} is not the array that the port wrote; if Orbax saved it since, "
                    f"load it with Orbax."
                )
            path = folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.nbytes:
                raise GdnError(f"{path} is not there or not of {shard.nbytes} bytes; the port must be whole.")
            files[shard.name] = path
            where[name] = (shard.name, Tensor(spec.dtype, spec.shape, 0, shard.nbytes - len(shard.trailer)))
        super().__init__(folder, side)
        self.files.update(files)
        self.where.update(where)
