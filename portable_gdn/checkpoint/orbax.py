"""Write and read Orbax checkpoints as plain files: each leaf is a zarr3 array, and JSON files describe the tree.

A leaf is one file: a zarr3 array with a sharding codec, whose elements are stored in order and uncompressed, followed
by an index of its parts. A leaf of any size can thus be streamed and memory-mapped, and Orbax can read the parts that a
device needs. By default, Orbax itself stores arrays in a database (OCDBT) instead; it reads both forms.
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

_PART = 64 * 2**20  # the approximate size of a part in bytes; a reader must read at least one part
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_HANDLER_V1 = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def _rows(spec: Spec) -> int:
    """Return the number of rows in a part; it divides the first axis, because all parts of a zarr array are equal."""
    rows, size = spec.shape[0], prod(spec.shape) * itemsize(spec.dtype)
    most = max(1, rows * _PART // max(size, 1))
    return next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)


def leaf(output: Output, root: str) -> Shard:
    """Return the file of a leaf, under ``root`` in the checkpoint."""
    spec = output.spec
    parts = spec.shape[0] // _rows(spec) if spec.shape else 1
    each = output.nbytes // parts
    index = np.array([[n * each, each] for n in range(parts)], "<u8").tobytes()
    place = "/".join(["c", *["0"] * len(spec.shape)])
    return Shard(f"{root}/{output.name}/{place}", b"", (output,), trailer=index)


def _array(spec: Spec) -> str:
    """Return the contents of a leaf's zarr.json."""
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
    """Return all other files of the checkpoint by path: each leaf's zarr.json, the tree, and the marks of a finished
    save.

    Args:
        outputs: The leaves.
        root: The folder of the tree in the checkpoint. One without a step ("state") has the form of Orbax's new API.
        empty: Paths of nodes of the tree that have no leaves.
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
    """The leaves of such a checkpoint and the port's side files, with the interface of ``Checkpoint``.

    Only arrays in the form that ``leaf`` writes are read. Arrays that Orbax saved must be loaded by Orbax.
    """

    def __init__(self, folder: Path, root: str, side: list[str], specs: Mapping[str, Spec]) -> None:
        """Open the leaves with these names, dtypes and shapes.

        Raises:
            GdnError: A leaf is missing, or has another form, dtype or shape.
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
