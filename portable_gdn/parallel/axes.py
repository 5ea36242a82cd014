"""Logical names for the axes of parameters, and rules that map these names to the axes of a mesh.

The metadata of each parameter of a layer or model has two entries with one item per axis: ``axes``, logical names such
as "embed" or "heads", and ``parts``, the number of units that must stay whole (for the columns of a projection, its
heads). Rules map each logical name to axes of a mesh; a mesh may lack some of them.
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
    """Return the axes of the mesh that split a logical axis; () if no rule names any, or the mesh has none of them.

    Args:
        name: The logical name of an array's axis; an axis with None is never split.
        mesh: A ``jax.sharding.Mesh``.
        rules: Rules that take precedence over ``AXIS_RULES``.

    Raises:
        GdnError: A rule has an unknown logical name, or its value is not made of names of axes.
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
    """Return the ``jax.sharding.PartitionSpec`` of an array with these logical axes.

    Args:
        axes: The logical name of each axis, or None.
        parts: The number of units of each axis that must stay whole. If it is not divisible by the number of devices,
            the axis is not split.
        mesh: A ``jax.sharding.Mesh``.
        rules: As in ``mesh_axes``.
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
    """Return the ``Sharding`` for calls on this mesh, from the rules for "batch", "heads" and "sequence".

    Raises:
        GdnError: The mesh has several devices, and no rule mentions any of its axes of more than one device.
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
