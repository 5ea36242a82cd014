"""Names of what the axes of arrays are, and which axes of a mesh split them.

A parameter of a layer or a model says of each of its axes what it holds, in its metadata: ``axes``, names such as
"embed" or "heads", and ``parts``, how many whole things the axis is made of (the heads of a projection's columns, which
are not cut). Rules say by which axes of a mesh each name is split; a mesh need not have all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..spec.errors import GdnError, bad
from .sharding import Sharding

__all__ = ["AXIS_RULES", "AxisRules", "call_sharding", "mesh_axes", "partition_spec"]

AxisRules = Mapping[str, str | tuple[str, ...] | None]

#: The usual names of a mesh's axes: rows over "data" and "fsdp", weights over "fsdp", heads, columns of MLPs and the
#: vocabulary over "tensor", tokens over "context".
AXIS_RULES: AxisRules = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),
    "heads": ("tensor",),
    "key_heads": ("tensor",),
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "vocabulary": ("tensor",),
    "experts": ("expert",),
}


def mesh_axes(name: str | None, mesh: Any, rules: AxisRules | None = None) -> tuple[str, ...]:
    """The axes of the mesh that split what has this name; none where no rule says so, or the mesh has none of them.

    Args:
        name: of an array's axis; None is one that is never split.
        mesh: a ``jax.sharding.Mesh``.
        rules: beside and before ``AXIS_RULES``.

    Raises:
        GdnError: a rule is of a name that nothing has, or of something else than names of axes.
    """
    for key, given in (rules or {}).items():
        if key not in AXIS_RULES:
            raise bad("rules", f"about {key!r}", f"be about {', '.join(AXIS_RULES)}")
        if not (given is None or isinstance(given, str | tuple)):
            raise bad(f"rules[{key!r}]", repr(given), "be the name of an axis of the mesh, a tuple of names, or None")
    said = {**AXIS_RULES, **(rules or {})}.get(name or "")
    names = (said,) if isinstance(said, str) else said or ()
    return tuple(n for n in names if n in mesh.shape)


def partition_spec(
    axes: tuple[str | None, ...], parts: tuple[int, ...], mesh: Any, rules: AxisRules | None = None
) -> Any:
    """How an array lies on a mesh, as a ``jax.sharding.PartitionSpec``.

    Args:
        axes: the name of each axis, or None.
        parts: how many whole things each axis has; where that is no multiple of the devices that would split it, the
            axis is left whole.
        mesh: a ``jax.sharding.Mesh``.
        rules: as in ``mesh_axes``.
    """
    from jax.sharding import PartitionSpec

    taken: set[str] = set()
    found: list[Any] = []
    for name, count in zip(axes, parts, strict=True):
        names = tuple(n for n in mesh_axes(name, mesh, rules) if n not in taken)
        if not names or count % math.prod(mesh.shape[n] for n in names):
            found.append(None)
            continue
        taken.update(names)
        found.append(names[0] if len(names) == 1 else names)
    return PartitionSpec(*found)


def call_sharding(mesh: Any, rules: AxisRules | None = None) -> Sharding:
    """How calls on such a mesh are split: rows, value heads and tokens by the rules for batch, heads and sequence.

    Raises:
        GdnError: the mesh has axes of more than one device, and no rule speaks of any of them.
    """
    roles = {
        role: mesh_axes(name, mesh, rules) or None
        for role, name in (("batch", "batch"), ("heads", "heads"), ("sequence", "sequence"))
    }
    spoken = {n for name in AXIS_RULES for n in mesh_axes(name, mesh, rules)}
    silent = [n for n in mesh.axis_names if n not in spoken and mesh.shape[n] > 1]
    if silent:
        raise GdnError(
            f"the mesh has an axis {silent[0]!r}, which no rule speaks of; say what it splits, such as "
            f"rules={{'heads': {silent[0]!r}}} (or 'batch', 'embed', 'sequence')."
        )
    return Sharding(**roles, mesh=mesh)
