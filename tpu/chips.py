"""What is known of each TPU, from one data file. No jax here."""

from __future__ import annotations

import json
from importlib import resources
from typing import NamedTuple

from ..spec.errors import bad

__all__ = ["CHIPS", "Chip", "chip_named"]


class Chip(NamedTuple):
    """One TPU as a compiler sees it; figures are those of one core. ``chips.json`` names their sources.

    device_kind, topology: libtpu's names of it and of the smallest slice that libtpu describes.
    cores: TensorCores of one device; where there are two, "parallel" grid dimensions are split over them.
    mxu_side, mxu_count, rows_per_cycle, push_cycles: its matrix units, and what a load of rows takes.
    vmem_bytes; hbm_bytes_per_second and bf16_flops (a second); dma_granule_bytes, the unit of copies in a listing.
    """

    name: str
    device_kind: str
    topology: str
    cores: int
    mxu_side: int
    mxu_count: int
    rows_per_cycle: int
    push_cycles: int
    vmem_bytes: int
    hbm_bytes_per_second: float
    bf16_flops: float
    dma_granule_bytes: int

    @property
    def clock_hz(self) -> float:
        """Cycles a second, from the peak rate of the matrix units."""
        return self.bf16_flops / (2 * self.mxu_count * self.mxu_side**2 * self.rows_per_cycle)


def _read() -> dict[str, Chip]:
    text = resources.files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    return {name: Chip(name, **row) for name, row in json.loads(text)["chips"].items()}


#: By name, oldest first.
CHIPS = _read()


def chip_named(name: str) -> Chip:
    """The chip of this name.

    Raises:
        GdnError: there is none.
    """
    if name not in CHIPS:
        raise bad("chip", repr(name), f"be one of {', '.join(CHIPS)}")
    return CHIPS[name]
