"""Checks of a LoRA adapter before it is ported: factors in pairs, with the rank and scaling that its configuration
states.

adapter_config.json gives the rank r and alpha, and may give other values for some modules (``rank_pattern`` and
``alpha_pattern``, regular expressions that match the end of a module's name). An adapter adds scaling * B A to a
projection, where scaling is alpha / r, or alpha / sqrt(r) if ``use_rslora`` is true. A port keeps the factors unchanged
and records the scaling of each module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from ..spec.errors import GdnError, bad
from .lora import CONFIG, PREFIX, Factor, Slots, factor_of
from .spelling import unwrapped
from .table import Spec

__all__ = ["Adapter", "adapter_of", "target_settings"]

_LONGEST = 512  # the largest length of a pattern, in characters


@dataclass(frozen=True)
class Adapter:
    """The configuration of an adapter (empty if it has none) and its slots."""

    config: Mapping[str, Any]
    slots: Slots
    where: Path
    modules: Mapping[str, str] = field(default_factory=dict)  # from a factor's name to the name of its module

    def rank(self, module: str) -> int | None:
        """Return the rank that the configuration gives to a module, or None if it gives none."""
        return self._whole("rank_pattern", "r", module)

    def alpha(self, module: str) -> float | None:
        """Return the alpha of a module's adapter, by its pattern or the default; None if the configuration has none."""
        found = self._pattern("alpha_pattern", module, self.config.get("lora_alpha"))
        if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise bad(f"{self.where / CONFIG}'s lora_alpha of {module}", repr(found), "be a number")
        return found

    def scaling(self, module: str, rank: int) -> float | None:
        """Return the number by which B A is multiplied, or None if the configuration does not give it."""
        alpha = self.alpha(module)
        if alpha is None:
            return None
        return alpha / sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _whole(self, patterns: str, key: str, module: str) -> int | None:
        found = self._pattern(patterns, module, self.config.get(key))
        if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
            raise bad(f"{self.where / CONFIG}'s {key} of {module}", repr(found), "be a positive whole number")
        return found

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """Return the value of the first pattern that matches the end of the module's name, or the default."""
        patterns = self.config.get(key) or {}
        if not isinstance(patterns, dict):
            raise bad(f"{self.where / CONFIG}'s {key}", repr(patterns)[:80], "map names of modules to numbers")
        for pattern, value in patterns.items():
            if pattern == module or module.endswith("." + pattern):
                return value
            try:
                if len(pattern) <= _LONGEST and re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
                    return value
            except re.error as error:
                raise bad(f"{self.where / CONFIG}'s {key}", repr(pattern)[:80], f"be regular ({error})") from None
        return default


def adapter_of(inventory: Mapping[str, Spec], slots: Slots, config: Mapping[str, Any], where: Path) -> Adapter:
    """Return the adapter that these tensors form, after checking that every projection has all its factors.

    Args:
        inventory: The tensors by name.
        slots: The slots of these tensors.
        config: The contents of adapter_config.json.
        where: The folder, for messages.

    Raises:
        GdnError: One of two factors is missing, their ranks differ, or the configuration contradicts them.
    """
    pairs: dict[tuple[str, str, bool], dict[str, str]] = {}
    modules = {}
    for name in inventory:
        factor = factor_of(unwrapped(name))
        if factor is not None:
            module = _own(factor)
            modules[name] = module
            embedding = factor.kind.startswith("embedding")
            kind = factor.kind.removeprefix("embedding_") + factor.leaf.replace("weight", "")
            pairs.setdefault((module, factor.slot, embedding), {})[kind] = name
    adapter = Adapter(config, slots, where, modules)
    magnitudes = {key[:2]: pairs.pop(key) for key in list(pairs) if set(pairs[key]) == {"magnitude_vector"}}
    if magnitudes:
        ((module, _), names), *_ = magnitudes.items()
        raise GdnError(
            f"{names['magnitude_vector']} is there, but the factors lora_A and lora_B of {module} are missing."
        )
    for (module, _, embedding), names in pairs.items():
        _check_pair(adapter, module, names, inventory, embedding)
    return adapter


def _own(factor: Factor) -> str:
    """Return the name of the factor's module in its model."""
    return factor.module.removeprefix(PREFIX).replace(".base_layer", "")


def _check_pair(
    adapter: Adapter, module: str, names: Mapping[str, str], inventory: Mapping[str, Spec], embedding: bool
) -> None:
    for half, other in (("A", "B"), ("B", "A")):
        if half not in names:
            word = "lora_embedding_" if embedding else "lora_"
            have = names.get(other) or next(iter(names.values()))
            lacking = have.replace(word + other, word + half) if other in names else f"{word}{half} of {module}"
            raise GdnError(
                f"{have} is there and {lacking} is not; an adapter must have both factors of every projection."
            )
    a, b = names["A"], names["B"]
    ranks = [inventory[a].shape[:1], inventory[b].shape[1:]]
    if ranks[0] != ranks[1]:
        raise GdnError(
            f"{a} has shape {list(inventory[a].shape)} and {b} {list(inventory[b].shape)}: rank {_rank(ranks[0])} and "
            f"rank {_rank(ranks[1])}; the two factors of a projection must have one rank."
        )
    (rank,) = ranks[0]
    if rank < 1:
        raise GdnError(f"{a} has rank 0; an adapter must have a positive rank.")
    config = adapter.config
    if not config or len(adapter.slots.names) > 1:
        return
    said = adapter.rank(module)
    if said is not None and said != rank:
        source = "rank_pattern" if said != config.get("r") else "r"
        raise GdnError(
            f"{a} has rank {rank} and {CONFIG} says {said} ({source}); its scaling is computed from the rank, so the "
            f"two must agree."
        )
    dora = config.get("use_dora")
    if dora and "magnitude_vector" not in names:
        raise GdnError(f"{CONFIG} says use_dora, and lora_magnitude_vector of {module} is not there; it must be.")
    if dora is False and "magnitude_vector" in names:
        raise GdnError(
            f"{names['magnitude_vector']} is there and {CONFIG} says that use_dora is false; they must agree."
        )


def _rank(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "none"


def target_settings(
    config: Mapping[str, Any], ranks: Mapping[str, int], scalings: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for the modules of a target.

    Args:
        config: The source's adapter_config.json.
        ranks: The rank of each of the target's modules.
        scalings: The number by which each module's B A is multiplied.
    """
    found = dict(config)
    counts: dict[int, int] = {}
    for rank in ranks.values():
        counts[rank] = counts.get(rank, 0) + 1
    r = max(counts, key=lambda rank: counts[rank]) if counts else config.get("r")
    stable = bool(config.get("use_rslora"))
    alphas: dict[str, float] = {}
    for module, rank in ranks.items():
        scaling = scalings.get(module)
        if scaling is not None:
            own = scaling * (sqrt(rank) if stable else rank)
            alphas[module] = round(own) if abs(own - round(own)) < 1e-9 else own
    alpha = config.get("lora_alpha")
    found.update(
        r=r,
        target_modules=sorted(ranks),
        rank_pattern={re.escape(m): rank for m, rank in ranks.items() if rank != r},
        alpha_pattern={re.escape(m): a for m, a in alphas.items() if a != alpha},
        modules_to_save=None,
    )
    return found
