"""Dialects: tables from tensor names to layouts, and what a table says about the tensors of a checkpoint.

A dialect is one way to name and lay out a model's pieces: a family's published files, a library's parameter tree, ours.
``bind`` reads a checkpoint's inventory by a dialect and finds where each piece of each layer is (``Place``);
``lay_out`` goes the other way and says which tensors a dialect would make of those pieces. A port is the first by one
dialect and the second by another, so nothing about a conversion is written anywhere but in the two tables.
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
    """What a header says of a tensor, without its place in a file."""

    dtype: str
    shape: tuple[int, ...]


class Key(NamedTuple):
    """A piece of a certain layer and expert (-1 where it belongs to none)."""

    piece: str
    layer: int = -1
    expert: int = -1


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    name: the tensor's name; {i} is the layer, {e} the expert, {j} the layer's place in a scanned block.
    layout: see ``layout``; "@i", "@e", "@j", "@g" run along axes.
    period: layers a scanned block has: layer = g * period + j.
    places: the j that this row is for; None is all.
    when: "linear" or "full": the row is for layers with or without linear attention (told by their A_log); None is
    both. layer: the layer that a name without a number belongs to.
    zeros: where this dialect is written and the piece is missing, it is made of zeros; one that holds nothing else may
        be dropped where it has no place.
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
        """The indices of a piece by the letters that this row may use."""
        found = {"i": key.layer, "e": key.expert}
        if self.period is not None:
            found.update(g=key.layer // self.period, j=key.layer % self.period)
            if self.places is not None:  # j counts within the row's own places
                found["p"] = self.places.index(found["j"]) if found["j"] in self.places else -1
        return found

    def key(self, piece: str, index: Mapping[str, int]) -> Key:
        """The piece that has these indices."""
        layer = index.get("i", self.layer)
        if self.period is not None:
            j = index["j"] if "j" in index else self.places[index.get("p", 0)] if self.places else 0
            layer = index["g"] * self.period + j
        return Key(piece, layer, index.get("e", -1))


@dataclass(frozen=True)
class Dialect:
    """A table, with what is true of names as a whole.

    prefix: what this checkpoint has where the table says "model.".
    spelled: the table's name of each tensor, where names differ by more than the prefix; see ``spelling``.
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
        """The name as the table has it."""
        if name in self.spelled:
            return self.spelled[name]
        if self.prefix != "model." and name.startswith(self.prefix) and not name.startswith("lm_head."):
            return "model." + name[len(self.prefix) :]
        return name

    def actual(self, name: str) -> str:
        """The table's name as the checkpoint has it."""
        if self.prefix != "model." and name.startswith("model."):
            return self.prefix + name[len("model.") :]
        return name

    def rows(self, name: str) -> tuple[tuple[Entry, ...], tuple[int, ...]]:
        """The rows that may describe a tensor, and the numbers in its name."""
        numbers: list[int] = []

        def blank(found: re.Match[str]) -> str:
            numbers.append(int(found[3]))
            return f"{found[1]}{found[2]}{{}}"

        template = _NUMBERED.sub(blank, self.normal(name))
        return self.by_template.get(template, ()), tuple(numbers)


def entries(table: Mapping[str, str | Sequence[str]], under: str = "", **options: Any) -> tuple[Entry, ...]:
    """Rows from a mapping of names to layouts; of several layouts the first is the one that is written."""
    return tuple(
        Entry(under + name, layout(text), **options)
        for name, texts in table.items()
        for text in ([texts] if isinstance(texts, str) else texts)
    )


@dataclass(frozen=True)
class Bound:
    """A tensor and the row that describes it: indices from its name, sizes of all its dims.

    scale: whether it holds block scales of the tensor that the row describes. fault: why they cannot be carried over.
    """

    name: str
    spec: Spec
    entry: Entry
    index: Mapping[str, int]
    sizes: Mapping[str, int]
    scale: bool = False
    fault: str = ""


class Place(NamedTuple):
    """Where a piece is: a tensor, the segment of its layout, and where along its index axes."""

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
        dialect: the table to read by.
        inventory: what is there, by name.
        known: sizes of dims, from the configuration.
        block: rows and columns that share a scale, where weights are quantised in blocks.
        linear_layers: layers with linear attention beside those whose A_log is here.

    Returns:
        The place of each piece; names that no row describes; the sizes of all dims of the checkpoint.

    Raises:
        GdnError: a tensor's shape contradicts its row, a size cannot be told, or a piece is there twice.
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
    while waiting and len(sizes) != told:  # what one tensor tells may be needed to read another
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
    """A piece in words."""
    where = "" if key.layer < 0 else f" of layer {key.layer}"
    return f"{key.piece}{where}" + ("" if key.expert < 0 else f", expert {key.expert}")


def _read(
    name: str,
    rows: tuple[Entry, ...],
    numbers: tuple[int, ...],
    inventory: Mapping[str, Spec],
    sizes: dict[str, int],
) -> Bound | None:
    """The tensor by the first row that its shape fits; new sizes are added; None if sizes are still missing."""
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
    """The tensor of block scales that belongs to a weight: the same layout, its innermost dims counted in blocks."""
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
    """A tensor that a dialect makes of pieces: its row, indices in its name, and the place of each piece in it."""

    name: str
    entry: Entry
    index: dict[str, int]
    scale: bool
    sizes: dict[str, int] = field(default_factory=dict)
    parts: dict[Key, tuple[int, dict[str, int]]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.entry.layout.shape(self.sizes)


def lay_out(
    dialect: Dialect, places: Mapping[Key, Place], wanted: Callable[[Key], bool] | None = None
) -> tuple[dict[str, Made], list[Key]]:
    """The tensors that a dialect makes of these pieces, and the pieces it has no row for.

    Raises:
        GdnError: a tensor would have some of its pieces and not the others.
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
