"""Read a checkpoint by its family's table: which family it belongs to, and which piece of a model each tensor is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.errors import GdnError, bad
from .adapters import Adapter, adapter_of
from .completeness import (
    absent,
    attention_of_fla,
    layer_kinds,
    only_linear,
    parts_lacking,
    refuse_incomplete,
    split_off_later_layers,
    told_kinds,
    uneven,
    without_head,
)
from .configuration import check_config, check_mixer, check_sizes, text_config
from .dequantise import Dequantising, can_dequantise
from .dtypes import FLOAT8, WIDE
from .families import ALL, VISION, Family, Mixer, Rule, families_of
from .families.family import MIXER_PIECES
from .identity import model_types, no_linear_layer, unknown_model
from .lora import ADAPTER_RULES, CONFIG, PREFIX, is_adapter, is_factor, refuse_others, slots_of, with_factors
from .quantised import quantisation, refuse_quantised
from .reader import Checkpoint, read_json
from .regrouping import chunked, note
from .spelling import spell, unwrapped
from .table import MEANING, SCALE, Dialect, Key, Place, Spec, bind

__all__ = ["Read", "find_family", "linear_layers", "read"]


@dataclass(frozen=True)
class Read:
    """A source, read by its family's table."""

    checkpoint: Checkpoint
    family: Family
    dialect: Dialect
    places: dict[Key, Place]
    sizes: dict[str, int]
    carried: tuple[tuple[str, tuple[str, ...], bool], ...]  # the rule, the names, and whether they belong to the tree
    block: int | None = None
    notes: tuple[str, ...] = ()
    lora: Adapter | None = None

    @property
    def mixer(self) -> Mixer | None:
        """What the linear layers compute, or None if the configuration does not say."""
        try:
            return self.family.mixer(self.checkpoint.config)
        except (KeyError, TypeError):
            return None

    @property
    def adapter(self) -> bool:
        """Whether it is an adapter and not a model."""
        return any(is_factor(key.piece) for key in self.places)

    @property
    def published(self) -> bool:
        """Whether the names are those of the family's releases, without wrappers or another prefix."""
        wrapped = any(name != unwrapped(name) for name in self.dialect.spelled)
        return not wrapped and self.dialect.prefix in ("model.", *self.family.prefixes)

    @property
    def bare(self) -> bool:
        """Whether it is a single layer outside a model."""
        return any(place.bound.entry.layer >= 0 for place in self.places.values())

    @property
    def linear_layers(self) -> list[int]:
        """The layers with linear attention, judged by the tensors."""
        return sorted({key.layer for key in self.places if key.piece in ("A_log", "A_log_2", "g_norm")})


def _unread(family: Family, names: Sequence[str]) -> int:
    """Return how many tensors, by their names, neither the family's table nor its rules describe."""
    slots = slots_of(names) if is_adapter(names) else None
    spelling = spell(family, names, slots=slots, strict=False)
    dialect = Dialect(family.name, family.table, spelling.prefix, spelling.names)
    if slots is not None:
        dialect = with_factors(dialect, slots)
    rules = [re.compile(rule.pattern) for rule in family.rules]
    count = 0
    for name in names:
        base = name.removesuffix("_scale_inv")
        if not dialect.rows(base)[0] and not any(rule.fullmatch(dialect.normal(name)) for rule in rules):
            count += 1
    return count


def find_family(checkpoint: Checkpoint, named: str | None = None) -> tuple[Family, tuple[str, ...]]:
    """Return the family of a checkpoint: the one that config.json names, if the tensors agree, or the one they show.

    The names of tensors prove little, because those of a plain Llama occur in many families. A linear-attention layer
    whose names are in a family's table is proof if config.json names a family that is supported. If it names another
    model, ``named`` must say which family to use.

    Raises:
        GdnError: The checkpoint is not of a supported family; the message says what it is and what is supported.
    """
    names = list(checkpoint.inventory)
    if named is not None:
        family = min(families_of(named), key=lambda family: _unread(family, names), default=None)
        if family is None:
            raise bad("--family", repr(named), f"be one of {', '.join(f.name for f in ALL)}")
        _must_be_linear(checkpoint, family)
        return family, ()
    said = model_types(checkpoint.config)
    options = next((found for found in map(families_of, said) if found), ())
    promised = min(options, key=lambda family: _unread(family, names), default=None)
    order = sorted(ALL, key=lambda family: family is not promised)
    if promised is None:
        fits = [family for family in order if not _unread(family, names) and _has_decay(family, names)]
        raise unknown_model(checkpoint.folder, checkpoint.config, names, fits)
    if not _unread(promised, names):
        _must_be_linear(checkpoint, promised)
        return promised, ()
    left = {family.name: _unread(family, names) for family in order}
    best = min(order, key=lambda family: left[family.name])
    if left[promised.name] > left[best.name] == 0 and _has_decay(best, names):
        return best, (f"config.json says model_type {said[0]}; the tensors are those of {best.title}, and are read so",)
    if left[promised.name] == len(names):
        raise GdnError(
            f"{checkpoint.folder} is of model_type {said[0]}, and none of its tensors ({_some(names)}) has a name that "
            f"{promised.title}'s have."
        )
    _must_be_linear(checkpoint, promised)
    return promised, ()


def _must_be_linear(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse a model without a linear-attention layer, unless its configuration says that it has none."""
    names = list(checkpoint.inventory)
    if not is_adapter(names) and not _has_decay(family, names) and not told_kinds(checkpoint.config)[0]:
        raise no_linear_layer(checkpoint.folder, checkpoint.config, names)


def _has_decay(family: Family, names: Sequence[str]) -> bool:
    """Whether there is a tensor that occurs in linear attention only: a decay, a convolution or a low-rank gate."""
    spelling = spell(family, names, strict=False)
    dialect = Dialect(family.name, family.table, spelling.prefix, spelling.names)
    proof = MIXER_PIECES - {"q", "k", "v", "z", "out"}
    return any(not proof.isdisjoint(row.layout.pieces) for name in names for row in dialect.rows(name)[0])


def read(
    checkpoint: Checkpoint, family: str | None = None, base: Mapping[str, Any] | None = None, dequantise: str = ""
) -> Read:
    """Read a checkpoint by its family's table.

    Args:
        checkpoint: The open checkpoint.
        family: The name of the family whose table is used; None recognises it.
        base: The configuration of the model that an adapter is for.
        dequantise: The dtype into which quantised weights are turned during the port; "" leaves them as they are.

    Raises:
        GdnError: A tensor is unknown, contradicts the table or occurs twice, or a scale is missing.
    """
    check_config(checkpoint.config if base is None else base)
    if dequantise:
        checkpoint = Dequantising(checkpoint, wide=dequantise != "bfloat16")
    names = list(checkpoint.inventory)
    adapter = is_adapter(names)
    said = read_json(checkpoint.folder / CONFIG) if adapter and (checkpoint.folder / CONFIG).is_file() else {}
    if adapter:
        refuse_others(names, said, checkpoint.path)
    if adapter != (base is not None):
        raise bad("--base", "not given" if adapter else "given", "be given for an adapter, and for nothing else")
    if base is not None:
        checkpoint.config = dict(base)
        family = family or str(base.get("model_type"))
    found, notes = find_family(checkpoint, family)
    slots = slots_of(names) if adapter else None
    lora = adapter_of(checkpoint.inventory, slots, said, checkpoint.folder) if slots is not None else None
    spelling = spell(found, names, slots=slots)
    notes += spelling.notes(found, PREFIX if adapter else "")
    dialect = Dialect(found.name, found.table, spelling.prefix, spelling.names)
    if slots is not None:
        dialect = with_factors(dialect, slots)
    config = checkpoint.config
    carried, inventory = _carried((*found.rules, *(ADAPTER_RULES if adapter else ())), dialect, checkpoint)
    block = None if dequantise else _block(config)
    unread = [name for name in inventory if not dialect.rows(name)[0]]
    refuse_quantised(checkpoint.folder, config, inventory, unread, not dequantise and can_dequantise(checkpoint))
    known = found.dims(config)
    for dim, size in known.items():
        if isinstance(size, bool) or not 0 < size < 2**31:
            raise bad(f"config.json's {MEANING.get(dim, dim)}", size, "be a positive whole number")
    plain = {name: spec for name, spec in inventory.items() if checkpoint.stored(name) == (name,)}
    checkpoint.regroup(chunked(found, dialect, plain, known))
    inventory.update((name, checkpoint.inventory[name]) for name in inventory if name in checkpoint.regrouped)
    if checkpoint.regrouped:
        notes += (note(checkpoint.regrouped),)
    kinds = None if adapter else layer_kinds(found, dialect, inventory, config)
    linear = linear_layers(config) if kinds is None else sorted(kinds.linear)
    places, unknown, sizes = bind(dialect, inventory, known, block, linear)
    if unknown:
        raise GdnError(
            f"{found.title} has no tensors like {_some(unknown)} (of {checkpoint.where[unknown[0]][0]}); every tensor "
            f"must be known, and nothing was written."
        )
    _check_dtypes(places)
    check_mixer(found, config)
    # an adapter may have an embedding with more tokens than its model has
    check_sizes(found, config, places, {dim: n for dim, n in sizes.items() if not (adapter and dim == "V")})
    if kinds is not None:
        headless = without_head(spelling.prefix, config)
        lacking = absent(found, dialect, config, places, sizes, kinds, only_linear(config), headless)
        parts: dict[str, int | None] = {
            rule.name: kinds.count if rule.every else None for rule in found.rules if rule.tree
        }
        depth = (config.get("vision_config") or {}).get("depth")
        parts[VISION] = depth if isinstance(depth, int) and 0 < depth < 10**4 else None
        for rule, group, _ in carried:
            lacking += uneven([dialect.normal(name) for name in group], parts[rule]) if rule in parts else []
            for whole in found.rules:
                lacking += parts_lacking(whole, dialect, group) if whole.name == rule else []
        refuse_incomplete(str(checkpoint.folder), found.title, list(dict.fromkeys(lacking)), checkpoint.hint)
    if isinstance(checkpoint, Dequantising):
        notes += checkpoint.notes()
    return Read(checkpoint, found, dialect, places, sizes, carried, block, notes, lora)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _carried(
    every: Sequence[Rule], dialect: Dialect, checkpoint: Checkpoint
) -> tuple[tuple[tuple[str, tuple[str, ...], bool], ...], dict[str, Spec]]:
    """Return what the rules carry over unchanged, by rule, and the tensors that the table must describe."""
    rules = [(rule, re.compile(rule.pattern)) for rule in every]
    found: dict[str, tuple[list[str], bool]] = {}
    rest: dict[str, Spec] = {}
    inventory = checkpoint.inventory
    later = set(split_off_later_layers(dialect, inventory, checkpoint.config))
    for name, spec in inventory.items():
        if name in later:
            found.setdefault("layers after the last one (multi-token prediction)", ([], False))[0].append(name)
            continue
        normal = dialect.normal(name)
        for rule, pattern in rules:
            if pattern.fullmatch(normal):
                found.setdefault(rule.name, ([], rule.tree))[0].append(name)
                break
        else:
            rest[name] = spec
    return tuple((rule, tuple(names), tree) for rule, (names, tree) in found.items()), rest


def _block(config: Mapping[str, Any]) -> int | None:
    """Return how many rows and columns share a scale, if the configuration says that there are quantised blocks."""
    block = quantisation(config).get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(set(map(str, block))) != 1 or len(block) != 2:
        raise bad("weight_block_size", block, "be two equal whole numbers")
    if not isinstance(block[0], int) or isinstance(block[0], bool) or block[0] < 1:
        raise bad("weight_block_size", block, "be two equal whole numbers")
    return block[0]


def _check_dtypes(places: Mapping[Key, Place]) -> None:
    """Check that weights are floating-point numbers, and that those in eight bits have scales.

    Raises:
        GdnError: A weight is of another dtype or has no scales.
    """
    for key, place in places.items():
        spec, name = place.bound.spec, place.bound.name
        if place.bound.scale:
            continue
        if spec.dtype in FLOAT8:
            if key._replace(piece=key.piece + SCALE) not in places:
                raise GdnError(
                    f"{name} is {spec.dtype} and {name}_scale_inv is not there; a weight in eight bits must have its "
                    f"block scales."
                )
        elif spec.dtype not in WIDE:
            raise GdnError(
                f"{name} is {spec.dtype} and has no scales that are known here; weights must be floating-point numbers "
                f"({', '.join(WIDE)}), so the checkpoint must be dequantised first."
            )


def linear_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers with linear attention by the configuration; adapters need this because their tensors may not
    tell."""
    config = text_config(config)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")
    kda = (config.get("linear_attn_config") or {}).get("kda_layers")
    if isinstance(kda, list):
        return tuple(n - 1 for n in kda)  # kda_layers counts from 1
    count, full = (
        config.get("num_hidden_layers"),
        config.get("full_attention_interval") or config.get("layer_group_size"),
    )
    attention = attention_of_fla(config)
    if attention is not None:
        return tuple(n for n in range(count or 0) if n not in attention)
    return tuple(n for n in range(count or 0) if not full or (n + 1) % full)
