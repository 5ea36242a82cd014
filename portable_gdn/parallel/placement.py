"""Determine which axes of a mesh split a call, from the caller's ``Sharding`` or from the arrays' own shardings."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..spec.errors import GdnError, bad, did_you_mean
from ..spec.operands import OPERANDS
from ..spec.problem import Signature
from .sharding import ROLES, Sharding

__all__ = ["Split", "role_of", "signature_of_a_shard", "split_of"]

Array = Any
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """How a call is split over a mesh.

    Attributes:
        mesh: A ``jax.sharding.Mesh`` or ``AbstractMesh``.
        batch, heads, sequence: The names of the axes of more than one device that split each, the outermost first.
        manual: The axes that the call's own ``shard_map`` makes manual: all except those of an enclosing one.
    """

    mesh: Any
    batch: Axes
    heads: Axes
    sequence: Axes
    manual: frozenset[str]

    def parts(self, role: str) -> int:
        """Return the number of parts into which "batch", "heads" or "sequence" is split."""
        return math.prod(self.mesh.shape[name] for name in getattr(self, role))

    def splits_keys(self, s: Signature) -> bool:
        """Return whether key heads are split like value heads; if not, each device selects those that it needs."""
        return s.H % self.parts("heads") == 0


def role_of(s: Signature, name: str, ndim: int) -> tuple[str | None, ...]:
    """Return how each axis of an operand may be split: by "batch", "heads" or "sequence"; None means not at all."""
    axes = [axis for axis in OPERANDS[name].axes if not (s.step and axis == "T")]
    rows = None if s.packed else "batch"
    roles = {"B": "batch", "N": rows, "H": "heads", "HV": "heads", "HV * n": "heads", "T": "sequence"}
    found = [roles.get(axis) for axis in axes[:ndim]]
    return (*found, *[None] * (ndim - len(found)))


def split_of(s: Signature, operands: Mapping[str, Array], sharding: Sharding | None) -> Split | None:
    """Return how the call is split, or None if it is not.

    Args:
        s: The signature of the whole call.
        operands: Its arrays.
        sharding: The caller's choice. None reads it from the arrays, which is possible outside a trace and on a mesh
            with explicit axes.

    Raises:
        GdnError: The call cannot be split in this way.
    """
    if sharding is not None and not isinstance(sharding, Sharding):
        raise bad("sharding", f"a {type(sharding).__name__}", "be None or a portable_gdn.Sharding")
    if s.library != "jax":
        if sharding is not None:
            raise bad("sharding", f"given with {s.library} arrays", "come with JAX arrays, which a mesh can hold")
        return None
    found = _of_arrays(s, operands) if sharding is None else _as_asked(s, operands, sharding)
    if found is None or found.mesh.size == 1 or s.B * s.T == 0:
        return None
    _check(s, found)
    return found


def _as_asked(s: Signature, operands: Mapping[str, Array], sharding: Sharding) -> Split:
    mesh = sharding.mesh
    if mesh is None:
        mesh = _current() or next((m for _, m, _ in _shardings(s, operands)), None)
        if mesh is None:
            raise bad("sharding.mesh", "None, and no mesh is current", "be a mesh, or be set by jax.set_mesh")
    if not hasattr(mesh, "axis_names"):
        raise bad("sharding.mesh", f"a {type(mesh).__name__}", "be a jax.sharding.Mesh")
    _check_devices(s, operands, mesh)
    taken = frozenset(getattr(mesh, "manual_axes", ()))
    axes = {}
    for role in ROLES:
        for name in sharding.axes(role):
            if name not in mesh.axis_names:
                known = ", ".join(map(repr, mesh.axis_names))
                hint = did_you_mean(name, mesh.axis_names) or "."
                raise GdnError(f"sharding.{role} is {name!r}, which is no axis of the mesh; its axes are {known}{hint}")
            if name in taken:
                raise bad(
                    f"sharding.{role}",
                    repr(name),
                    "leave out the axes of the jax.shard_map around the call, whose arrays are shards already",
                )
        axes[role] = tuple(name for name in sharding.axes(role) if mesh.shape[name] > 1)
    if s.step:
        axes["sequence"] = ()  # of one token
    return Split(mesh, **axes, manual=frozenset(mesh.axis_names) - taken)


def _current() -> Any:
    """Return the mesh that jax.set_mesh set, or None."""
    mesh = sys.modules["jax"].sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _check_devices(s: Signature, operands: Mapping[str, Array], mesh: Any) -> None:
    """Refuse arrays that are committed to devices outside the mesh."""
    if s.traced or not isinstance(mesh, sys.modules["jax"].sharding.Mesh):  # abstract ones have no devices
        return
    there = set(mesh.devices.flat)
    for name, x in operands.items():
        if getattr(x, "committed", False) and x.devices() != there:
            kinds = sorted({device.platform for device in there})
            where = ", ".join(sorted(map(str, x.devices()))[:8])
            raise bad(name, f"on {where}", f"be on the {len(there)} {' and '.join(kinds)} devices of sharding.mesh")


def _shardings(s: Signature, operands: Mapping[str, Array]) -> Iterator[tuple[str, Any, tuple[Axes, ...]]]:
    """Yield the name, the mesh and the axes of each dimension of operands that are sharded over several devices."""
    jax = sys.modules["jax"]
    explicit, named, traced = jax.sharding.AxisType.Explicit, jax.sharding.NamedSharding, s.traced
    for name, x in operands.items():
        if traced:
            where = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
        else:  # every call comes here, and whether something is a jax.Array takes half a microsecond to find out
            where = getattr(x, "sharding", None)
        if not isinstance(where, named) or where.mesh.size == 1:
            continue
        if traced and explicit not in where.mesh.axis_types:
            continue
        spec = (*where.spec, *[None] * (x.ndim - len(where.spec)))
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
        axes = tuple(tuple(n for n in e if isinstance(n, str) and where.mesh.shape[n] > 1) for e in entries)
        yield name, where.mesh, axes


def _of_arrays(s: Signature, operands: Mapping[str, Array]) -> Split | None:
    """Return the split that follows from the arrays' shardings; the first operand that is split determines it."""
    every = list(_shardings(s, operands))
    if not every:
        return None
    mesh = next((m for _, m, axes in every if any(axes)), every[0][1])
    strict = sys.modules["jax"].sharding.AxisType.Explicit in mesh.axis_types
    chosen: dict[str, Axes] = dict.fromkeys(ROLES, ())
    source: dict[str, str] = {}
    for name, own, axes in every:
        if own != mesh:
            continue
        for role, found in zip(role_of(s, name, len(axes)), axes, strict=True):
            if not found or name.startswith("conv_"):  # small, and placed anew
                continue
            if role in (None, "sequence"):
                if strict:
                    raise GdnError(_not_by_itself(name, role, found))
                continue  # gathered, as by XLA itself
            used = {n for other, taken in chosen.items() if other != role for n in taken}
            if (chosen[role] and chosen[role] != found) or used & set(found):
                if strict:
                    there = ", ".join(f"{source[r]}'s {r} over {chosen[r]}" for r in source)
                    raise GdnError(f"{name} is sharded over {found} along its {role}, and {there}; they must agree.")
                continue
            chosen[role], source[role] = found, name
    taken = frozenset(getattr(mesh, "manual_axes", ()))
    return Split(mesh, **chosen, manual=frozenset(mesh.axis_names) - taken)


def _not_by_itself(name: str, role: str | None, axes: Axes) -> str:
    over = ", ".join(map(repr, axes))
    if role == "sequence":
        return (
            f"{name} is sharded over its tokens by {over}; give sharding=portable_gdn.Sharding(sequence=...) for "
            "context parallelism, or it must be resharded (jax.sharding.reshard)."
        )
    if name == "qkv":
        return (
            f"qkv is sharded over q | k | v by {over}; it must be given as three arrays, each of which splits by heads."
        )
    return (
        f"{name} is sharded by {over} along an axis that cannot be split; it must be resharded (jax.sharding.reshard)."
    )


def _check(s: Signature, split: Split) -> None:
    if split.batch and s.packed:
        raise bad("sharding.batch", repr(split.batch), "be None where cu_seqlens is given: its sequences share one row")
    if split.sequence and s.conv is not None and not split.splits_keys(s):
        n = split.parts("heads")
        must = f"be a multiple of the {n} devices of sharding.heads in a mixer whose tokens sharding.sequence splits"
        raise bad("H", s.H, must)
    for role, size, what in (("batch", s.B, "B"), ("heads", s.HV, "HV")):
        n = split.parts(role)
        if n == 1:
            continue
        if not isinstance(size, int):
            raise bad(f"sharding.{role}", repr(getattr(split, role)), f"be None while {what} = {size} is a symbol")
        if size % n:
            axes = ", ".join(map(repr, getattr(split, role)))
            raise bad(
                f"{what}",
                f"{size}",
                f"be a multiple of the {n} devices of {axes}, over which sharding.{role} splits it",
            )


def signature_of_a_shard(s: Signature, operands: Mapping[str, Array], sharding: Sharding | None) -> Signature:
    """Return the signature of the call that each device makes if this one is split, or else the signature itself.

    Raises:
        GdnError: As in ``split_of``.
    """
    split = split_of(s, operands, sharding)
    if split is None:
        return s
    batch, heads = split.parts("batch"), split.parts("heads")
    own = s.HV // heads
    H = s.H // heads if split.splits_keys(s) else (1 if (s.HV // s.H) % own == 0 else own)
    rows = s.N if s.packed else s.N // batch
    return replace(s, B=s.B // batch, N=rows, H=H, HV=own, T=-(-s.T // split.parts("sequence")))
