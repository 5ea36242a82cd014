"""The way back: reconstruct the original checkpoint from a port and its record of the source (``provenance``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..spec.errors import GdnError, bad
from .families import Family, family_named
from .header import Header
from .lora import PREFIX, Slots, slots_of, with_factors
from .output import Output, Part
from .plan import check_shared
from .reader import Checkpoint
from .regrouping import chunked, regroup
from .spelling import spell
from .table import Bound, Dialect, Key, Made, Spec, bind, describe
from .targets import FAMILY_TARGETS, STEP, TREES
from .targets.jax import jax_dialect
from .targets.maxtext import maxtext_dialect

__all__ = ["Record", "plan_back"]


@dataclass(frozen=True)
class Record:
    """What a port records about its source so that the original can be written again; see ``provenance``."""

    target: str
    family: str
    prefix: str
    sizes: dict[str, int]
    block: int | None
    headers: dict[str, Header]
    carried: dict[str, tuple[str, ...]]
    dequantised: dict[str, str]
    settings: dict[str, Any]
    linear_layers: tuple[int, ...] = ()


def plan_back(record: Record, port: Checkpoint, lossy: bool = False) -> tuple[list[Output], list[str]]:
    """Plan the tensors of the original checkpoint, in the order of its files and of the data in them.

    Args:
        record: What the port recorded about its source.
        port: The files of the port, including its side files.
        lossy: Whether to cast tensors back to a dtype that the port's smaller dtype cannot represent exactly.

    Returns:
        The outputs, and the names of those whose bytes differ from the original's because a cast was lossy.

    Raises:
        GdnError: The port is not complete, has tensors for which the original had no place, or a cast was lossy and
            ``lossy`` is false.
    """
    family = family_named(record.family)
    if family is None:
        raise bad("the port's family", repr(record.family), "be one that this version knows")
    originals = {
        name: Spec(t.dtype, t.shape) for header in record.headers.values() for name, t in header.tensors.items()
    }
    carried = {name for names in record.carried.values() for name in names}
    scales = set(record.dequantised.values())
    slots = slots_of(originals) if record.settings.get("lora") else None
    spelling = spell(family, originals, record.prefix, slots)
    dialect = Dialect(family.name, family.table, record.prefix, spelling.names)
    if slots is not None:
        dialect = with_factors(dialect, slots)
    layers = record.linear_layers
    described = {n: s for n, s in originals.items() if n not in carried}
    regrouped = chunked(family, dialect, described, record.sizes)
    for name, group in regrouped.items():
        described[name] = Spec(described[name].dtype, (group.rows, *described[name].shape[1:]))
    wanted, unknown, _ = bind(dialect, described, record.sizes, record.block, layers)
    if unknown:
        raise GdnError(
            f"{unknown[0]} was in the port's source and is not known to this version; it cannot be written back."
        )
    joined = set(record.settings.get("joined", ()))  # the factors that these were made from are carried unchanged
    inventory = {
        n: s
        for n, s in port.inventory.items()
        if n not in carried and n not in joined and (n, record.target) != (STEP, "maxtext")
    }
    have, extra, _ = bind(
        port_dialect(record.target, family, record.settings, slots), inventory, record.sizes, record.block, layers
    )
    if extra:
        raise GdnError(f"{extra[0]} is in the port and was not in its source; the way back has no place for it.")
    bounds: dict[str, dict[Key, tuple[int, dict[str, int]]]] = {}
    kinds: dict[str, Bound] = {}
    for key, place in wanted.items():
        name = place.bound.name
        if name in scales or name in record.dequantised:
            continue
        if key not in have:
            raise GdnError(f"{describe(key)}, which {name} is made of, is not in the port; it must be whole.")
        bounds.setdefault(name, {})[key] = (place.segment, dict(place.along))
        kinds[name] = place.bound
    for key in have.keys() - wanted.keys():
        bound = have[key].bound
        if not bound.entry.zeros or port.array(bound.name).any():
            raise GdnError(
                f"{bound.name} holds {describe(key)}, for which the source has no place; it must be all zeros."
            )
    outputs, lost = [], []
    for name, spec in originals.items():
        if name in carried:
            if port.inventory.get(name) != spec:
                raise GdnError(f"{name} was carried over unchanged and is not in the port as it was; it must be.")
            outputs.append(Output(name, spec, copied=name))
            continue
        if name in scales or name in record.dequantised:
            lost.append(name)
            continue
        bound = kinds[name]
        made = Made(name, bound.entry, dict(bound.index), bound.scale, dict(bound.sizes), bounds[name])
        check_shared([made], have, port)
        parts = tuple(Part(have[key], segment, index) for key, (segment, index) in made.parts.items())
        dtypes = {part.place.bound.spec.dtype for part in parts}
        if any(not widens(spec.dtype, dtype) for dtype in dtypes):
            lost += regrouped[name].parts if name in regrouped else [name]
        outputs.append(Output(name, described[name], made, parts, cast=dtypes != {spec.dtype}))
    whole = {output.name: output for output in outputs if output.name in regrouped}
    lengths = {name: originals[name].shape[0] for name in regrouped}
    outputs = [
        regroup(output, originals[output.name], regrouped, whole, port, lengths) if output.name in regrouped else output
        for output in outputs
    ]
    lost = list(dict.fromkeys(lost))
    if lost and not lossy:
        raise GdnError(
            f"{lost[0]} and {len(lost) - 1} more were cast when they were ported, and lost what their bytes "
            f"held; the way back "
            f"must be asked for with --lossy, which casts them back."
        )
    return outputs, lost


def widens(small: str, large: str) -> bool:
    """Whether the second dtype can represent every value of the first, so that casting there and back is exact."""
    if small == large:
        return True
    return (small, large) in {("BF16", "F32"), ("F16", "F32"), ("F32", "F64"), ("BF16", "F64"), ("F16", "F64")}


def port_dialect(target: str, family: Family, settings: Mapping[str, Any], slots: Slots | None = None) -> Dialect:
    """Return the dialect in which a target's names and layouts are written."""
    if slots is not None:
        other = family_named(str(settings.get("family")))
        own = jax_dialect(family) if other is None else Dialect(other.name, other.table, PREFIX + "model.")
        return with_factors(own, slots)
    if target in TREES:
        return jax_dialect(family)
    if target == "maxtext":
        return maxtext_dialect(family, str(settings.get("layout")), settings.get("period"))
    other = family_named(str(settings.get("family")))
    if target in FAMILY_TARGETS and other is not None:
        return Dialect(other.name, other.table)
    raise bad("the port's target", repr(target), "be one that this version knows")
