"""Join the LoRA factors of several projections that are a single projection in the target; the result is exact.

If parts q, k and v have factors A_q, B_q and so on, whose ranks may differ, then one pair whose rank is the sum of the
ranks gives the same update. A stacks the A of all parts. B is block-structured: it has each part's B in that part's
rows and columns, and zeros elsewhere, so B A has each part's own update in that part's rows. A part without factors
gets rows of zeros. Training does not keep the zeros at zero, so a trained pair cannot be taken apart. The factors of
the parts are therefore carried in the port as well, and the way back uses them if the joined pair is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import NamedTuple

import numpy as np

from ..spec.errors import GdnError
from .adapters import Adapter
from .dtypes import FLOATS, dtype_of
from .lora import RANK
from .output import Output
from .reader import Checkpoint
from .table import Dialect, Entry, Key, Place, Spec

__all__ = ["Joined", "join"]


@dataclass
class Joined:
    """The result of ``join``.

    Attributes:
        outputs: The joined factors.
        keys: The pieces that they contain.
        carried: The source's tensors that hold these pieces, to be copied unchanged.
        scalings, ranks: For each joined projection, its scaling and rank by the name of its A.
    """

    outputs: list[Output] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)
    carried: list[str] = field(default_factory=list)
    scalings: dict[str, float | None] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass
class _Group:
    """What goes into one projection of the target: the rows of its A and B, its indices, and the pieces found."""

    a: Entry
    b: Entry
    index: dict[str, int]
    pieces: list[Key] = field(default_factory=list)


def join(
    dialect: Dialect,
    places: Mapping[Key, Place],
    wanted: Callable[[Key], bool] | None,
    checkpoint: Checkpoint,
    adapter: Adapter,
    sizes: Mapping[str, int],
    dtype: str | None,
) -> Joined:
    """Join the factors of all of the target's projections whose parts have factors of their own.

    Args:
        dialect: The target's dialect.
        places: The pieces of the source.
        wanted: Which pieces the target has a place for.
        checkpoint: The source.
        adapter: Its configuration.
        sizes: The sizes of dims, for parts that have no factors.
        dtype: The dtype to which floating-point tensors are cast, or None.

    Raises:
        GdnError: The scalings or dtypes of the parts differ, or a part lacks the magnitude (DoRA) that others have.
    """
    found = Joined()
    for name, group in _groups(dialect, places, wanted).items():
        sources = {places[key].bound.name for key in group.pieces}
        if len(sources) == 1 and len(group.pieces) == len(group.a.layout.pieces):
            continue
        _join_one(found, name, group, _Parts(dialect, places, checkpoint, adapter), sizes, dtype)
    return found


def _groups(dialect: Dialect, places: Mapping[Key, Place], wanted: Callable[[Key], bool] | None) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for key in places:
        if wanted is not None and not wanted(key):
            continue
        a = next((entry for entry in dialect.by_piece.get(key.piece, ()) if entry.admits(key.layer)), None)
        if a is None or not a.layout.shared or "#A" not in key.piece:
            continue
        b = next(entry for entry in dialect.by_piece[_other(key, "B").piece] if entry.admits(key.layer))
        index = {letter: n for letter, n in a.local(key).items() if "{" + letter + "}" in a.name}
        name = dialect.actual(a.name.format(**index))
        groups.setdefault(name, _Group(a, b, index)).pieces.append(key)
    return groups


def _other(key: Key, kind: str) -> Key:
    return key._replace(piece=key.piece.replace("#A", "#" + kind))


class _Parts(NamedTuple):
    """Where the parts of projections come from: the target's names, and the source's tensors and configuration."""

    dialect: Dialect
    places: Mapping[Key, Place]
    checkpoint: Checkpoint
    adapter: Adapter


def _join_one(
    found: Joined, name: str, group: _Group, source: _Parts, sizes: Mapping[str, int], dtype: str | None
) -> None:
    dialect, places, checkpoint, adapter = source
    where: dict[str, int] = {}  # the first row of each A in the joined A
    total = 0
    for key in group.pieces:
        bound = places[key].bound
        if bound.name not in where:
            where[bound.name] = total
            total += bound.sizes[RANK]
    every = [place for key in group.pieces for place in (places[key], places[_other(key, "B")])]
    for kind, what in (("M", "magnitude (DoRA)"), ("C", "bias of B")):
        have = [key for key in group.pieces if _other(key, kind) in places]
        if have and len(have) != len(group.a.layout.pieces):
            raise GdnError(
                f"{places[_other(have[0], kind)].bound.name} is the {what} of a part of "
                f"{name.partition('.lora_A')[0]}, and other parts have none; the target has one for all, so "
                f"each part must have its own."
            )
    spec_dtype = _dtype(name, every, dtype)
    scalings = {place.bound.name: _scaling(adapter, place) for place in every[::2]}
    first, *rest = scalings.values()
    for other in rest:
        if (first is None) != (other is None) or (first is not None and not isclose(first, other or 0.0)):
            raise GdnError(
                f"{' and '.join(list(scalings)[:2])} have the scalings {first} and {other}, and are parts of one "
                f"projection in the target; the parts must have one scaling."
            )
    whole = {**sizes, RANK: total}
    for place in every:
        whole.update({dim: n for dim, n in place.bound.sizes.items() if dim != RANK and dim[0] != "@"})
    parts = [(places[key], places[_other(key, "B")], key) for key in group.pieces]

    def factor_a() -> np.ndarray:
        out = np.empty(group.a.layout.shape(whole), dtype_of(spec_dtype))
        for a, _, _ in parts:
            start = where[a.bound.name]
            view = _turned(a, checkpoint, group.a.layout.dims(0))
            out[start : start + view.shape[0]] = view
        return out

    def factor_b() -> np.ndarray:
        lay = group.b.layout
        out = np.zeros(lay.shape(whole), dtype_of(spec_dtype))
        for a, b, key in parts:
            start = where[a.bound.name]
            segment = lay.pieces.index(_other(key, "B").piece)
            into = lay.view(out, whole, segment, {})
            into[..., start : start + a.bound.sizes[RANK]] = _turned(b, checkpoint, lay.dims(segment))
        return out

    for entry, made in ((group.a, factor_a), (group.b, factor_b)):
        own = dialect.actual(entry.name.format(**group.index))
        cast = dtype is not None and {place.bound.spec.dtype for place in every} != {spec_dtype}
        found.outputs.append(Output(own, Spec(spec_dtype, entry.layout.shape(whole)), cast=cast, computed=made))
        if cast:
            found.casts[own] = (every[0].bound.spec.dtype, spec_dtype)
    found.keys |= {k for key in group.pieces for k in (key, _other(key, "B"))}
    found.carried += [n for n in dict.fromkeys(place.bound.name for place in every) if n not in found.carried]
    found.scalings[name], found.ranks[name] = first, total


def _turned(place: Place, checkpoint: Checkpoint, dims: tuple[str, ...]) -> np.ndarray:
    """Return the elements of a piece, with the axes in this order."""
    lay = place.bound.entry.layout
    view = lay.view(checkpoint.array(place.bound.name), place.bound.sizes, place.segment, place.along)
    own = lay.dims(place.segment)
    return view.transpose([own.index(dim) for dim in dims])


def _dtype(name: str, every: list[Place], dtype: str | None) -> str:
    have = sorted({place.bound.spec.dtype for place in every})
    if dtype is not None and all(kind in FLOATS.values() for kind in have):
        return FLOATS[dtype]
    if len(have) > 1:
        raise GdnError(f"{name} is made of tensors in {', '.join(have)}; it must have one dtype: cast with --dtype.")
    return have[0]


def _scaling(adapter: Adapter, place: Place) -> float | None:
    if len(adapter.slots.names) > 1:  # a single configuration cannot describe several adapters
        return None
    module = adapter.modules[place.bound.name]
    return adapter.scaling(module, place.bound.sizes[RANK])
