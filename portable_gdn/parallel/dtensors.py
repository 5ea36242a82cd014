"""Calls with torch's ``DTensor``: each process computes its own rows and heads on the backend for its local tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..spec.errors import GdnError, bad
from ..spec.operands import OPERANDS
from ..spec.problem import Options, Result

__all__ = ["compute_shards", "has_dtensors"]

Array = Any
#: A call of plain tensors: its result, and the states on the way where they were asked for.
Local = Callable[[dict[str, Array]], tuple[Result, Array | None]]

_ROLES = {"B": "rows", "N": "rows", "H": "heads", "HV": "heads", "HV * n": "heads", "T": "tokens"}


def has_dtensors(operands: Mapping[str, Array]) -> bool:
    """Whether any operand is a ``DTensor``."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(a, tensor.DTensor) for a in operands.values())


def compute_shards(operands: dict[str, Array], options: Options, local: Local) -> tuple[Result, Array | None]:
    """Compute a call with DTensors and return its results as DTensors.

    If any operand is sharded along rows or heads over an axis of the mesh, that axis splits the rows or heads of the
    whole call: the other operands are sharded in the same way. For operands without such a dimension, the gradients of
    all processes are summed.

    Args:
        operands: DTensors on one mesh. Plain tensors must be the same in every process.
        options: The options of the call.
        local: The function that makes one process's call.

    Raises:
        GdnError: The DTensors are on several meshes, or are sharded along a dimension other than rows and heads.
    """
    import torch.distributed.tensor as dt

    meshes = {id(a.device_mesh): a.device_mesh for a in operands.values() if isinstance(a, dt.DTensor)}
    mesh = next(iter(meshes.values()))
    for name, a in operands.items():
        if isinstance(a, dt.DTensor) and a.device_mesh != mesh:
            raise bad(name, f"a DTensor on {a.device_mesh}", f"lie on the mesh of the others, {mesh}")
    split = _split(operands, options, mesh)
    packed = "cu_seqlens" in operands
    taken = {name: _own(name, a, options, packed, mesh, split) for name, a in operands.items()}
    result, states = local(taken)
    rows, heads = (None if packed else 0), (1 if options.step else 2)

    def joined(a: Array | None, row: int | None, head: int | None) -> Array | None:
        if a is None:
            return None
        axes = {"rows": row, "heads": head, None: None}
        dims = [axes[role] for role in split]
        where = [dt.Replicate() if dim is None else dt.Shard(dim) for dim in dims]
        return dt.DTensor.from_local(a, mesh, where, run_check=False)

    o = joined(result.o, 0, heads)
    result = Result(o, joined(result.state, rows, 1), joined(result.conv_state, rows, None))
    return result, joined(states, 0, 2)


def _role(name: str, dim: int, options: Options, packed: bool) -> str | None:
    """Return what a dimension of an operand counts: "rows", "heads", "tokens", or None for anything else."""
    axes = [axis for axis in OPERANDS[name].axes if not (options.step and axis == "T")]
    role = _ROLES.get(axes[dim]) if dim < len(axes) else None
    return None if packed and role == "rows" else role


def _split(operands: Mapping[str, Array], options: Options, mesh: Any) -> list[str | None]:
    """Return what each axis of the mesh splits: "rows", "heads", or None for nothing."""
    import torch.distributed.tensor as dt

    packed = "cu_seqlens" in operands
    found: list[str | None] = [None] * mesh.ndim
    for name, a in operands.items():
        for axis, where in enumerate(a.placements if isinstance(a, dt.DTensor) else ()):
            if where.is_replicate() or mesh.size(axis) == 1:
                continue
            if not isinstance(where, dt.Shard):
                raise bad(name, f"a DTensor placed {where}", "be sharded or replicated; its redistribute() does that")
            role = _role(name, where.dim % a.ndim, options, packed)
            if role == "tokens":
                raise GdnError(
                    f"{name} is a DTensor sharded over its tokens, and calls of DTensors are split over rows and heads "
                    "alone; redistribute it, or give JAX arrays with sharding=portable_gdn.Sharding(sequence=...)."
                )
            if role is None or (role == "heads" and options.num_heads is not None):
                what = "a mixer is split over rows alone" if role else "that dimension cannot be split"
                raise GdnError(f"{name} is a DTensor sharded along dimension {where.dim}, and {what}; redistribute it.")
            if found[axis] not in (None, role):
                raise GdnError(
                    f"{name} has its {role} split over axis {axis} of the mesh, and others their {found[axis]}; all "
                    "must have the same split over it."
                )
            found[axis] = role
    return found


def _own(name: str, a: Array, options: Options, packed: bool, mesh: Any, split: list[str | None]) -> Array:
    """Return this process's part of an operand."""
    import torch
    import torch.distributed.tensor as dt

    if not isinstance(a, torch.Tensor):
        return a
    if not isinstance(a, dt.DTensor):
        a = dt.DTensor.from_local(a, mesh, [dt.Replicate()] * mesh.ndim, run_check=False)
    where: list[Any] = []
    back: list[Any] = []
    for axis, role in enumerate(split):
        dims = [d for d in range(a.ndim) if role is not None and _role(name, d, options, packed) == role]
        if not dims:
            where.append(dt.Replicate())
            back.append(dt.Partial() if role is not None else dt.Replicate())
            continue
        parts = mesh.size(axis)
        if a.shape[dims[0]] % parts:
            what = f"a multiple of the {parts} processes over which its {role} are split"
            raise bad(f"dimension {dims[0]} of {name}", a.shape[dims[0]], f"be {what}")
        where.append(dt.Shard(dims[0]))
        back.append(dt.Shard(dims[0]))
    return a.redistribute(mesh, where).to_local(grad_placements=back)
