"""The properties of each TPU, from one data file, and the TPU that a program is compiled for."""

from __future__ import annotations

import json
from importlib import resources
from typing import NamedTuple

from ..spec.errors import bad

__all__ = ["CHIPS", "COMMON", "Chip", "chip_named", "target"]

#: Bytes of VMEM that a grid step of the plain kernels may use, at most: v5p and v7x have 64 MiB per core, and the
#: compiler wants some.
VMEM_LIMIT = 48 << 20


class Chip(NamedTuple):
    """The properties of a TPU that a compiler needs, per core. ``chips.json`` names their sources.

    Attributes:
        device_kind, topology: libtpu's names for the device, and for the smallest slice that libtpu describes.
        cores: TensorCores per device; if there are two, "parallel" grid dimensions are split over them.
        mxu_side, mxu_count, rows_per_cycle, push_cycles: The matrix units, and the cycles to load rows into them.
        vmem_bytes: The size of VMEM.
        hbm_bytes_per_second, bf16_flops: The bandwidth of HBM, and the peak rate of products in bfloat16 per second.
        dma_granule_bytes: The unit of copies in a listing.
        devices: The devices per chip.
        ici_links: The links from one chip to others.
        ici_bytes_per_second: The bandwidth of each link in one direction.
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
    devices: int
    ici_links: int
    ici_bytes_per_second: float

    @property
    def gathers(self) -> bool:
        """Whether the chip can gather sublanes."""
        return self.name != "v4"

    @property
    def vmem_limit(self) -> int:
        """The bytes of VMEM that a grid step of the plain kernels may use; the rest is left to the compiler."""
        return min(VMEM_LIMIT, self.vmem_bytes // 4 * 3)

    @property
    def clock_hz(self) -> float:
        """Cycles per second, derived from the peak rate of the matrix units."""
        return self.bf16_flops / (2 * self.mxu_count * self.mxu_side**2 * self.rows_per_cycle)


def _read() -> dict[str, Chip]:
    text = resources.files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    return {name: Chip(name, **row) for name, row in json.loads(text)["chips"].items()}


#: By name, oldest first.
CHIPS = _read()


def chip_named(name: str) -> Chip:
    """Return the chip with this name.

    Raises:
        GdnError: The name is unknown.
    """
    if name not in CHIPS:
        raise bad("chip", repr(name), f"be one of {', '.join(CHIPS)}")
    return CHIPS[name]


#: The chip that plans are for where no TPU is compiled for, as in an interpreter.
COMMON = CHIPS["v6e"]


def target() -> Chip:
    """Return the TPU that this process or the current trace compiles for, or a common one if that is not a TPU.

    Raises:
        GdnError: It is a TPU that ``chips.json`` does not describe.
    """
    from jax.experimental.pallas import tpu as pltpu

    try:
        version = str(pltpu.get_tpu_info().chip_version.value)
    except ValueError as error:  # "Unsupported TPU device kind: cpu"
        kind = str(error).partition(": ")[2].partition(".")[0]
        if kind.startswith("TPU"):
            raise bad("the device", f"a {kind}", f"be one of {', '.join(CHIPS)}") from None
        return COMMON
    return chip_named(version if version.startswith("v") else f"v{version}")
