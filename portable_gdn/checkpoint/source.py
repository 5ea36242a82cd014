"""A checkpoint as its family's table reads it: which family it is of, and the piece of a model that each tensor is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.errors import GdnError, bad
from .adapters import Adapter, adapter_of
from .dtypes import FLOAT8
from .families import ALL, Family, Mixer, family_named
from .lora import ADAPTER_RULES, CONFIG, PREFIX, is_adapter, is_factor, refuse_others, slots_of, with_factors
from .reader import Checkpoint, read_json
from .spelling import spell, unwrapped
from .table import MEANING, SCALE, Dialect, Key, Place, Spec, bind

__all__ = ["Read", "find_family", "linear_layers", "read"]


@dataclass(frozen=True)
class Read:
    """A source as its family's table reads it."""

    checkpoint: Checkpoint
    family: Family
    dialect: Dialect
    places: dict[Key, Place]
    sizes: dict[str, int]
    carried: tuple[tuple[str, tuple[str, ...], bool], ...]  # rule, names, whether they belong to the tree
    block: int | None = None
    notes: tuple[str, ...] = ()
    lora: Adapter | None = None

    @property
    def mixer(self) -> Mixer | None:
        """What the linear layers compute, or None where the configuration does not say."""
        try:
            return self.family.mixer(self.checkpoint.config)
        except (KeyError, TypeError):
            return None

    @property
    def adapter(self) -> bool:
        """Whether it is an adapter, not a model."""
        return any(is_factor(key.piece) for key in self.places)

    @property
    def published(self) -> bool:
        """Whether the names are as the family's releases have them: nothing wraps them, no other prefix is theirs."""
        wrapped = any(name != unwrapped(name) for name in self.dialect.spelled)
        return not wrapped and self.dialect.prefix in ("model.", *self.family.prefixes)

    @property
    def linear_layers(self) -> list[int]:
        """Layers with linear attention, by what the checkpoint holds."""
        return sorted({key.layer for key in self.places if key.piece in ("A_log", "A_log_2")})


def _unread(family: Family, names: Sequence[str]) -> int:
    """How many tensors a family's table and rules say nothing of, by names alone."""
    spelling = spell(family, names, strict=False)
    dialect = Dialect(family.name, family.table, spelling.prefix, spelling.names)
    rules = [re.compile(rule.pattern) for rule in family.rules]
    count = 0
    for name in names:
        base = name.removesuffix("_scale_inv")
        if not dialect.rows(base)[0] and not any(rule.fullmatch(dialect.normal(name)) for rule in rules):
            count += 1
    return count


def find_family(checkpoint: Checkpoint, named: str | None = None) -> tuple[Family, tuple[str, ...]]:
    """The family whose table reads the checkpoint, told by its tensors; config.json decides where several do.

    Raises:
        GdnError: none does; the sentence names what the nearest one cannot read.
    """
    names = list(checkpoint.where)
    if named is not None:
        family = family_named(named)
        if family is None:
            raise bad("--family", repr(named), f"be one of {', '.join(f.name for f in ALL)}")
        return family, ()
    said = checkpoint.config.get("model_type")
    promised = family_named(said) if isinstance(said, str) else None
    order = sorted(ALL, key=lambda family: family is not promised)
    left = {family.name: _unread(family, names) for family in order}
    best = min(order, key=lambda family: left[family.name])
    if promised is not None and left[promised.name] == left[best.name]:
        return promised, ()
    if left[best.name] == 0:
        return best, (f"config.json says model_type {said}; the tensors are those of {best.title}, and are read so",)
    if promised is not None and left[best.name] > 0:
        best = promised
    if left[best.name] == len(names):
        raise GdnError(
            f"{checkpoint.folder} holds no model that is known here (model_type {said}); its tensors must be "
            f"those of one of "
            f"{', '.join(f.title for f in ALL)}."
        )
    return best, ()


def read(checkpoint: Checkpoint, family: str | None = None, base: Mapping[str, Any] | None = None) -> Read:
    """Read a checkpoint by its family's table; ``base`` is the configuration of the model that an adapter is for.

    Raises:
        GdnError: a tensor is unknown, contradicts the table, is there twice, or a scale is missing.
    """
    names = list(checkpoint.where)
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
    rules = [(rule, re.compile(rule.pattern)) for rule in (*found.rules, *(ADAPTER_RULES if adapter else ()))]
    carried: dict[str, tuple[list[str], bool]] = {}
    inventory: dict[str, Spec] = {}
    layers = (checkpoint.config.get("text_config") or checkpoint.config).get("num_hidden_layers")
    for name, spec in checkpoint.inventory.items():
        normal = dialect.normal(name)
        number = re.match(r"model\.layers\.(\d+)\.", normal)
        if number and isinstance(layers, int) and int(number[1]) >= layers:
            carried.setdefault("layers after the last one (multi-token prediction)", ([], False))[0].append(name)
            continue
        for rule, pattern in rules:
            if pattern.fullmatch(normal):
                carried.setdefault(rule.name, ([], rule.tree))[0].append(name)
                break
        else:
            inventory[name] = spec
    quantised = (
        _text(checkpoint.config).get("quantization_config") or checkpoint.config.get("quantization_config") or {}
    )
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if block is not None and (
        not isinstance(block, list) or len(set(block)) != 1 or not isinstance(block[0], int) or block[0] < 1
    ):
        raise bad("weight_block_size", block, "be two equal whole numbers")
    known = found.dims(checkpoint.config)
    for dim, size in known.items():
        if isinstance(size, bool) or not 0 < size < 2**31:
            raise bad(f"config.json's {MEANING.get(dim, dim)}", size, "be a positive whole number")
    linear = linear_layers(checkpoint.config) if adapter else ()
    places, unknown, sizes = bind(dialect, inventory, known, block[0] if block else None, linear)
    if unknown:
        some = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
        raise GdnError(
            f"{found.title} has no tensors like {some}; every tensor must be known, and nothing was written."
        )
    for key, place in places.items():
        eight = place.bound.spec.dtype in FLOAT8 and not place.bound.scale
        if eight and key._replace(piece=key.piece + SCALE) not in places:
            name = place.bound.name
            raise GdnError(
                f"{name} is {place.bound.spec.dtype} and {name}_scale_inv is not there; a weight in eight bits "
                f"must have "
                f"its block scales."
            )
    return Read(
        checkpoint,
        found,
        dialect,
        places,
        sizes,
        tuple((r, tuple(n), t) for r, (n, t) in carried.items()),
        block[0] if block else None,
        notes,
        lora,
    )


def linear_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with linear attention by the configuration: for adapters, which do not hold what would tell."""
    config = _text(config)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")
    kda = (config.get("linear_attn_config") or {}).get("kda_layers")
    if isinstance(kda, list):
        return tuple(n - 1 for n in kda)  # counted from 1
    count, full = (
        config.get("num_hidden_layers"),
        config.get("full_attention_interval") or config.get("layer_group_size"),
    )
    if isinstance(config.get("attn"), dict):
        return tuple(n for n in range(count or 0) if n not in config["attn"].get("layers", ()))
    return tuple(n for n in range(count or 0) if not full or (n + 1) % full)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config
