"""Dialects: tables that map tensor names to layouts, and their application to the tensors of a checkpoint.

A dialect is one way to name and lay out a model's pieces: that of a family's published files, of a library's parameter
tree, or of ours. ``bind`` reads a checkpoint's inventory by a dialect and finds the place of each piece of each layer
(``Place``). ``lay_out`` does the opposite: it says which tensors a dialect would make of those pieces. A port is
``bind`` by one dialect and ``lay_out`` by another, so the two tables are all that defines a conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from ..spec.errors import GdnError
from .layout import Layout, layout

__all__ = [
    "MEANING",
    "SCALE",
    "Bound",
    "Dialect",
    "Entry",
    "Key",
    "Made",
    "Place",
    "Spec",
    "bind",
    "describe",
    "entries",
    "lay_out",
]

SCALE = "#scale"
"""Marks the piece that holds the block scales of another."""

_DECAYS = ("A_log", "attn.A")  # only layers with linear attention have one of these

_NUMBERED = re.compile(r"\b(layers|layer|experts)([._])(\d+)(?=\.)")
_BLANK = re.compile(r"\{[a-z]\}")


class Spec(NamedTuple):
    """The dtype and shape that a header gives for a tensor."""

    dtype: str
    shape: tuple[int, ...]


class Key(NamedTuple):
    """A piece of a certain layer and expert; -1 means that it belongs to no layer, or to no expert."""

    piece: str
    layer: int = -1
    expert: int = -1


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    Attributes:
        name: The tensor's name; {i} is the layer, {e} the expert, {j} the layer's place in a scanned block.
        layout: The layout of the tensor; "@i", "@e", "@j" and "@g" are axes that run over these indices.
        period: The number of layers in a scanned block: layer = g * period + j.
        places: The values of j that this row is for; None means all.
        when: "linear" if the row is for layers with linear attention (recognised by their A_log), "full" if it is for
            the others, None if it is for both.
        layer: The layer of a name without a number.
        zeros: Whether a missing piece is written as zeros. A tensor that holds nothing else may be dropped if the
            target has no place for it.
    """

    name: str
    layout: Layout
    period: int | None = None
    places: tuple[int, ...] | None = None
    when: str | None = None
    layer: int = -1
    zeros: bool = False

    def admits(self, layer: int) -> bool:
        """Whether this row is for that layer."""
        return self.period is None or self.places is None or layer % self.period in self.places

    def local(self, key: Key) -> dict[str, int]:
        """Return the indices of a piece, by the letters that this row may use."""
        found = {"i": key.layer, "e": key.expert}
        if self.period is not None:
            found.update(g=key.layer // self.period, j=key.layer % self.period)
            if self.places is not None:  # j counts the row's own places only
                found["p"] = self.places.index(found["j"]) if found["j"] in self.places else -1
        return found

    def key(self, piece: str, index: Mapping[str, int]) -> Key:
        """Return the piece that has these indices."""
        layer = index.get("i", self.layer)
        if self.period is not None:
            j = index["j"] if "j" in index else self.places[index.get("p", 0)] if self.places else 0
            layer = index["g"] * self.period + j
        return Key(piece, layer, index.get("e", -1))


@dataclass(frozen=True)
class Dialect:
    """A table, and what applies to all of its names.

    Attributes:
        name: The name of the dialect.
        entries: The rows.
        prefix: What this checkpoint's names have in place of the table's "model.".
        spelled: The table's name of each tensor, if names differ by more than the prefix; see ``spelling``.
        by_template: The rows by their names, with a blank for each number.
        by_piece: The rows by the pieces in their layouts.
    """

    name: str
    entries: tuple[Entry, ...]
    prefix: str = "model."
    spelled: Mapping[str, str] = field(default_factory=dict, compare=False)
    by_template: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict, compare=False)
    by_piece: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        templates: dict[str, list[Entry]] = {}
        pieces: dict[str, list[Entry]] = {}
        for entry in self.entries:
            templates.setdefault(_BLANK.sub("{}", entry.name), []).append(entry)
            for piece in entry.layout.pieces:
                pieces.setdefault(piece, []).append(entry)
        object.__setattr__(self, "by_template", {k: tuple(v) for k, v in templates.items()})
        object.__setattr__(self, "by_piece", {k: tuple(v) for k, v in pieces.items()})

    def normal(self, name: str) -> str:
        """Return the table's form of a checkpoint's name."""
        if name in self.spelled:
            return self.spelled[name]
        if self.prefix != "model." and name.startswith(self.prefix) and not name.startswith("lm_head."):
            return "model." + name[len(self.prefix) :]
        return name

    def actual(self, name: str) -> str:
        """Return the checkpoint's form of a table's name."""
        if self.prefix != "model." and name.startswith("model."):
            return self.prefix + name[len("model.") :]
        return name

    def rows(self, name: str) -> tuple[tuple[Entry, ...], tuple[int, ...]]:
        """Return the rows that may describe a tensor, and the numbers in its name."""
        numbers: list[int] = []

        def blank(found: re.Match[str]) -> str:
            numbers.append(int(found[3]))
            return f"{found[1]}{found[2]}{{}}"

        template = _NUMBERED.sub(blank, self.normal(name))
        return self.by_template.get(template, ()), tuple(numbers)


def entries(table: Mapping[str, str | Sequence[str]], under: str = "", **options: Any) -> tuple[Entry, ...]:
    """Return rows from a mapping of names to layouts. If a name has several layouts, the first is the one to write."""
    return tuple(
        Entry(under + name, layout(text), **options)
        for name, texts in table.items()
        for text in ([texts] if isinstance(texts, str) else texts)
    )


@dataclass(frozen=True)
class Bound:
    """A tensor and the row that describes it, with the indices in its name and the sizes of all its dims.

    Attributes:
        scale: Whether it holds the block scales of the tensor that the row describes.
        fault: Why its block scales cannot be carried over; "" if they can.
    """

    name: str
    spec: Spec
    entry: Entry
    index: Mapping[str, int]
    sizes: Mapping[str, int]
    scale: bool = False
    fault: str = ""


class Place(NamedTuple):
    """The place of a piece: a tensor, a segment of its layout, and positions along its index axes."""

    bound: Bound
    segment: int
    along: Mapping[str, int]


def bind(
    dialect: Dialect,
    inventory: Mapping[str, Spec],
    known: Mapping[str, int],
    block: int | None = None,
    linear_layers: Iterable[int] = (),
) -> tuple[dict[Key, Place], list[str], dict[str, int]]:
    """Find every piece in a checkpoint.

    Args:
        dialect: The table to read by.
        inventory: The tensors by name.
        known: The sizes of dims that the configuration gives.
        block: How many rows and columns share a scale, if weights are quantised in blocks.
        linear_layers: Layers with linear attention in addition to those that have an A_log.

    Returns:
        The place of each piece; the names that no row describes; the sizes of all dims of the checkpoint.

    Raises:
        GdnError: A tensor's shape contradicts its row, a size cannot be determined, or a piece occurs twice.
    """
    sizes = dict(known)
    rows: list[tuple[str, tuple[Entry, ...], tuple[int, ...]]] = []
    scales: list[str] = []
    unknown: list[str] = []
    linear = {dialect.rows(name)[1][:1] for name in inventory if name.endswith(_DECAYS)}
    linear |= {(layer,) for layer in linear_layers}
    for name in inventory:
        found, numbers = dialect.rows(name)
        kind = "linear" if numbers[:1] in linear else "full"
        found = tuple(entry for entry in found if entry.when in (None, kind))
        if found:
            rows.append((name, found, numbers))
        elif name.endswith("_scale_inv") and dialect.rows(name.removesuffix("_scale_inv"))[0]:
            scales.append(name)
        else:
            unknown.append(name)
    bounds: dict[str, Bound] = {}
    waiting, told = rows, -1
    while waiting and len(sizes) != told:  # a size found in one tensor may be needed to read another
        told, left = len(sizes), []
        for row in waiting:
            bound = _read(*row, inventory, sizes)
            if bound is None:
                left.append(row)
            else:
                bounds[row[0]] = bound
        waiting = left
    if waiting:
        name, found, _ = waiting[0]
        missing = found[0].layout.unsolved(sizes)
        raise GdnError(
            f"{name} has shape {list(inventory[name].shape)}, from which "
            f"{', '.join(MEANING.get(d, d) for d in missing)} "
            f"cannot be told; config.json must give them."
        )
    for name in scales:
        base = bounds[name.removesuffix("_scale_inv")]
        if block is None:
            raise GdnError(f"{name} holds block scales; config.json must say their block size (weight_block_size).")
        bounds[name] = _scale(name, inventory[name], base, block)
    places: dict[Key, Place] = {}
    for name in inventory:
        if name in bounds:
            for key, place in _places(bounds[name]):
                if key in places:
                    raise GdnError(
                        f"{name} and {places[key].bound.name} both hold {describe(key)}; one of them must go."
                    )
                places[key] = place
    return places, unknown, sizes


MEANING = {
    "Hk": "the number of key heads",
    "R": "value heads per key head",
    "Dk": "the key head's width",
    "Dv": "the value head's width",
    "H": "the number of attention heads",
    "Hkv": "the number of key-value heads",
    "D": "the attention head's width",
}


def describe(key: Key) -> str:
    """Return the name of a piece in words."""
    where = "" if key.layer < 0 else f" of layer {key.layer}"
    return f"{key.piece}{where}" + ("" if key.expert < 0 else f", expert {key.expert}")


def _read(
    name: str,
    rows: tuple[Entry, ...],
    numbers: tuple[int, ...],
    inventory: Mapping[str, Spec],
    sizes: dict[str, int],
) -> Bound | None:
    """Match a tensor with the first row that its shape fits, and add new sizes; None if sizes are still missing."""
    spec = inventory[name]
    waits = False
    for entry in rows:
        found = entry.layout.solve(spec.shape, sizes)
        if found is None:
            continue
        if entry.layout.unsolved(found):
            waits = True
            continue
        letters = [blank[1] for blank in _BLANK.findall(entry.name)]
        sizes.update({dim: n for dim, n in found.items() if dim[0].isupper()})
        used = {d for d in found if not d[0].isupper() or d in _named(entry)}
        return Bound(name, spec, entry, dict(zip(letters, numbers, strict=True)), {d: found[d] for d in used})
    if waits:
        return None
    raise GdnError(_misfit(name, spec, rows[0], sizes))


def _named(entry: Entry) -> set[str]:
    return {d for n in range(len(entry.layout.segments)) for d in entry.layout.dims(n)}


def _misfit(name: str, spec: Spec, entry: Entry, sizes: Mapping[str, int]) -> str:
    shape = list(spec.shape)
    if "conv" in name and len(shape) == 3 and shape[2] == 1 and shape[1] != 1:
        return (
            f"{name} has shape {shape}, channels x width x 1, as MLX stores it; conversions to MLX also add 1 "
            f"to the norms' "
            f"weights, so this checkpoint must be ported from the original instead."
        )
    widths = [sizes.get(dim) for dim in ("Hk", "R", "Dk", "Dv")]
    if name.endswith("_conv1d.weight") and None not in widths:
        Hk, R, Dk, Dv = widths
        total = 2 * Hk * Dk + Hk * R * Dv  # type: ignore[operator]
        if shape[:1] in ([-(-total // 3)], [total - 2 * -(-total // 3)]):
            return (
                f"{name} has {shape[0]} rows, a third of all, as transformers' save_pretrained cuts OLMo-Hybrid's "
                f"joined convolution; all three of a layer of OLMo-Hybrid must be cut so, into equal thirds of one "
                f"dtype, or be split at the heads' widths, as the original release has them."
            )
    text = entry.layout.text
    known = ", ".join(f"{d} = {n}" for d, n in sizes.items() if re.search(rf"\b{d}\b", text))
    return f"{name} has shape {shape}; it must be laid out as '{text}'" + (
        f" with {known}, by config.json and other tensors." if known else "."
    )


def _scale(name: str, spec: Spec, base: Bound, block: int) -> Bound:
    """Describe a tensor of block scales: it has the layout of its weight, with the innermost dims counted in blocks."""
    wanted = (*base.spec.shape[:-2], *(-(-n // block) for n in base.spec.shape[-2:]))
    if spec.shape != wanted:
        raise GdnError(
            f"{name} has shape {list(spec.shape)}; it must have {list(wanted)}, one scale for {block} x {block} "
            f"elements "
            f"of {base.name}."
        )
    lay, sizes, fault = base.entry.layout, dict(base.sizes), ""
    for n, axis in enumerate(lay.axes):
        terms = [axis] if n != lay.joined else [(*axis, *dims) for _, dims in lay.segments]
        for term in terms:
            if not term or term[-1][0] == "@" or term[-1] == "1":
                continue
            dim, whole = term[-1], len(terms) == 1 and len(term) == 1
            if base.sizes[dim] % block and not whole:
                fault = (
                    f"{name} has one scale for {block} rows, and {base.name} is made of parts of "
                    f"{base.sizes[dim]}, so its "
                    f"scales cannot be carried over; --dtype bfloat16 must be given, which applies them."
                )
            sizes[dim] = -(-base.sizes[dim] // block)
    return Bound(name, spec, base.entry, base.index, sizes, scale=True, fault=fault)


def _places(bound: Bound) -> Iterator[tuple[Key, Place]]:
    lay = bound.entry.layout
    letters = lay.indices
    for along in product(*(range(bound.sizes["@" + letter]) for letter in letters)):
        index = dict(zip(letters, along, strict=True))
        for segment, piece in enumerate(lay.pieces):
            key = bound.entry.key(piece + SCALE * bound.scale, {**bound.index, **index})
            yield key, Place(bound, segment, index)


@dataclass
class Made:
    """A tensor that a dialect makes of pieces: its row, the indices in its name, and the place of each piece in it."""

    name: str
    entry: Entry
    index: dict[str, int]
    scale: bool
    sizes: dict[str, int] = field(default_factory=dict)
    parts: dict[Key, tuple[int, dict[str, int]]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.entry.layout.shape(self.sizes)


def lay_out(
    dialect: Dialect, places: Mapping[Key, Place], wanted: Callable[[Key], bool] | None = None
) -> tuple[dict[str, Made], list[Key]]:
    """Return the tensors that a dialect makes of these pieces, and the pieces for which it has no row.

    Raises:
        GdnError: A tensor would have some of its pieces but not all.
    """
    made: dict[str, Made] = {}
    homeless: list[Key] = []
    for key, place in places.items():
        if wanted is not None and not wanted(key):
            homeless.append(key)
            continue
        piece, scale = key.piece.removesuffix(SCALE), key.piece.endswith(SCALE)
        for entry in dialect.by_piece.get(piece, ()):
            if entry.admits(key.layer):
                break
        else:
            homeless.append(key)
            continue
        local = entry.local(key)
        letters = [blank[1] for blank in _BLANK.findall(entry.name)]
        index = {letter: local[letter] for letter in letters}
        name = dialect.actual(entry.name.format(**index)) + "_scale_inv" * scale
        tensor = made.setdefault(name, Made(name, entry, index, scale))
        along = {letter: local[letter] for letter in entry.layout.indices}
        segment = entry.layout.pieces.index(piece)
        for dim in place.bound.entry.layout.dims(place.segment):
            size = place.bound.sizes[dim]
            if tensor.sizes.setdefault(dim, size) != size:
                raise GdnError(
                    f"{place.bound.name} has {dim} = {size} and other tensors that {name} is made of have "
                    f"{tensor.sizes[dim]}; they must agree."
                )
        for letter, n in along.items():
            tensor.sizes["@" + letter] = max(tensor.sizes.get("@" + letter, 0), n + 1)
        tensor.parts[key] = (segment, along)
    for tensor in made.values():
        _complete(tensor)
    return made, homeless


def _complete(tensor: Made) -> None:
    lay = tensor.entry.layout
    wanted = len(lay.segments)
    for letter in lay.indices:
        wanted *= tensor.sizes["@" + letter]
    if len(tensor.parts) != wanted:
        have = {segment for segment, _ in tensor.parts.values()}
        missing = [piece for n, piece in enumerate(lay.pieces) if n not in have] or ["some layers or experts"]
        raise GdnError(
            f"{tensor.name} is made of {wanted} pieces, and the source has {len(tensor.parts)} of them; "
            f"{', '.join(missing)} must be there too."
        )
