"""The family as three granularities: of the decay, of the erase gate and of the write gate.

This table is the only place that knows which published model is which combination; everything behind it
works with granularities alone.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["VARIANTS", "Granularity", "Variant"]


class Granularity(enum.Enum):
    """How finely a gate is given: one value for ... ."""

    NONE = "none"  # not given: decay 0 (keep all), erase 0 (erase nothing), write 1 (write all)
    HEAD = "head"  # a value head
    GROUP = "group"  # a group of adjacent key channels (decay only)
    CHANNEL = "channel"  # a channel: of the key for decay and erase, of the value for write


class Variant(NamedTuple):
    """One member of the family."""

    decay: Granularity
    erase: Granularity
    write: Granularity

    @property
    def name(self) -> str:
        """The published name, or the granularities where the combination has none."""
        for name, variant in VARIANTS.items():
            if variant == self:
                return name
        return f"decay={self.decay.value}, erase={self.erase.value}, write={self.write.value}"

    def __str__(self) -> str:
        return self.name


_NONE, _HEAD, _GROUP, _CHANNEL = Granularity

VARIANTS: dict[str, Variant] = {
    "DeltaNet": Variant(_NONE, _HEAD, _HEAD),
    "GDN": Variant(_HEAD, _HEAD, _HEAD),
    "tile-grouped": Variant(_GROUP, _HEAD, _HEAD),
    "KDA": Variant(_CHANNEL, _HEAD, _HEAD),
    "GDN-2": Variant(_CHANNEL, _CHANNEL, _CHANNEL),
    "GLA": Variant(_CHANNEL, _NONE, _NONE),
    "GLA (scalar)": Variant(_HEAD, _NONE, _NONE),
    "linear attention": Variant(_NONE, _NONE, _NONE),
}
