"""The members of the family, each described by the granularity of its decay, its erase gate and its write gate.

Only this table knows which combination a published model uses. The rest of the package works with granularities.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["VARIANTS", "Granularity", "Variant"]


class Granularity(enum.Enum):
    """The number of values that a gate has per token.

    Attributes:
        NONE: the gate is not given. The log decay is then 0 (keep everything), the erase gate 0 (erase nothing) and the
            write gate 1 (write everything).
        HEAD: one value per value head.
        GROUP: one value per group of adjacent key channels (decay only).
        CHANNEL: one value per channel: key channels for decay and erase, value channels for write.
    """

    NONE = "none"
    HEAD = "head"
    GROUP = "group"
    CHANNEL = "channel"


class Variant(NamedTuple):
    """One member of the family, described by the granularity of each of its gates."""

    decay: Granularity
    erase: Granularity
    write: Granularity

    @property
    def name(self) -> str:
        """The published name, or the three granularities if the combination has no name."""
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
