"""Map the names of a wrapped model (by torch.compile, data parallelism or a larger model) to those of the tables.

A wrapper may add a part to a name at any place: ``model._orig_mod.layers.0.``. A model inside a larger one has names
with another prefix (``model.language_model.layers.0.``), and a model that was saved without its head has no prefix
(``layers.0.``). The added parts and the prefix are recognised from the names and the family's table. This changes only
how a tensor is *read*: messages, side files and the way back keep its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..spec.errors import GdnError
from .families.family import Family
from .lora import ADAPTER_RULES, PREFIX, Slots, with_factors
from .table import Dialect

__all__ = ["WRAPPERS", "Spelling", "spell", "unwrapped"]

WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
}
"""Parts of names that wrappers add, and who does."""

_LAYERS = re.compile(r"((?:[^.]+\.)*?)layers\.\d+\.")
_FLAT = re.compile(r"(.*\.)?_?flat_param(_\d+)?")


@dataclass(frozen=True)
class Spelling:
    """How a checkpoint's names are read.

    Attributes:
        prefix: The prefix that takes the place of the table's "model.".
        parts: The parts that wrappers added and that were removed.
        names: The table's name of every tensor; empty if all tensors have it already.
    """

    prefix: str = "model."
    wrappers: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)

    def notes(self, family: Family, before: str = "") -> tuple[str, ...]:
        """Return sentences about what was removed from the names.

        A prefix that the family's own releases have is not mentioned. ``before`` is what an adapter's names have before
        it.
        """
        found = []
        if self.wrappers:
            parts = ", ".join(f"{part}. ({WRAPPERS[part]})" for part in self.wrappers)
            found.append(f"names are read without {parts}; --back restores them")
        own = self.prefix.removeprefix(before)
        if self.names and own not in ("model.", *family.prefixes):
            what = f"under {own!r}" if own else "without the prefix 'model.'"
            found.append(f"the text model's names are {what} and are read as {family.title}'s; --back restores them")
        return tuple(found)


def unwrapped(name: str) -> str:
    """Return the name without the parts that wrappers add."""
    parts = name.split(".")
    return name if WRAPPERS.keys().isdisjoint(parts) else ".".join(p for p in parts if p not in WRAPPERS)


def spell(
    family: Family,
    names: Iterable[str],
    prefix: str | None = None,
    slots: Slots | None = None,
    strict: bool = True,
) -> Spelling:
    """Determine how a family's table reads these names.

    Args:
        family: The family whose table and rules are used.
        names: The names of the checkpoint's tensors.
        prefix: The prefix in place of "model.", if it is already known.
        slots: The slots of an adapter, if it is one.
        strict: Whether to refuse names that can be read in two ways, or that become equal; otherwise the first is
            taken.

    Raises:
        GdnError: Names can be read in two ways, or some are flat parameters of FSDP.
    """
    bare = {name: unwrapped(name) if slots is None else slots.canonical(unwrapped(name)) for name in names}
    flat = next((name for name, short in bare.items() if _FLAT.fullmatch(short)), None)
    if flat is not None:
        raise GdnError(
            f"{flat} is a flat parameter of FSDP, in which the tensors of several modules lie end to end; the model "
            f"must be saved with its full state dict instead."
        )
    table = Dialect(family.name, family.table)
    rules = [re.compile(rule.pattern) for rule in (*family.rules, *(ADAPTER_RULES if slots is not None else ()))]
    if slots is not None:
        table = with_factors(table, slots)

    def has_row(name: str) -> bool:
        return bool(table.rows(name)[0] or table.rows(name.removesuffix("_scale_inv"))[0])

    def by_rule(name: str) -> bool:
        return any(rule.fullmatch(name) for rule in rules)

    if prefix is None:
        prefix = _prefix([short for short in bare.values() if not by_rule(short)], has_row, strict)
        if prefix is None:
            prefix = (PREFIX if any(short.startswith(PREFIX) for short in bare.values()) else "") + "model."
    starts = _starts(prefix)
    spelled: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, short in bare.items():
        options = ["model." + short[len(prefix) :]] if short.startswith(prefix) else []
        options += [short, *(short[len(start) :] for start in starts if short.startswith(start))]
        found = next((option for option in options if has_row(option) or by_rule(option)), options[0])
        spelled[name] = found
        if strict and taken.setdefault(found, name) != name and has_row(found):
            raise GdnError(
                f"{taken[found]} and {name} are both {found} without what wrappers and prefixes add to them; one of "
                f"the two must go."
            )
    parts = {part for name in bare for part in name.split(".")}
    wrappers = tuple(part for part in WRAPPERS if part in parts)
    return Spelling(prefix, wrappers, {} if all(name == short for name, short in spelled.items()) else spelled)


def _prefix(names: Sequence[str], has_row: Callable[[str], bool], strict: bool) -> str | None:
    """Return what precedes "layers." in the names that the table knows, or None if it knows none of them."""
    found: dict[str, str] = {}
    for name in names:
        place = _LAYERS.match(name)
        if place and place[1] not in found and has_row("model." + name[len(place[1]) :]):
            found[place[1]] = name
    if strict and len(found) > 1:
        one, other, *_ = found.values()
        raise GdnError(f"{one} and {other} are both read as layers of one text model; one of the two must go.")
    return next(iter(found), None)


def _starts(prefix: str) -> list[str]:
    """Return the prefix and the shorter ones that it begins with, longest first: the head may be under any."""
    parts = prefix.split(".")[:-1]
    return [".".join(parts[:n]) + "." for n in range(len(parts), 0, -1)] + [""]
