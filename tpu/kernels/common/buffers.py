"""The named buffers of a grid step in VMEM, which plans add up and kernels allocate, without jax."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from .tiles import whole_lanes

__all__ = ["Buffer", "bytes_of"]

_BYTES = {"float32": 4, "bfloat16": 2}


class Buffer(NamedTuple):
    """An array in VMEM, or ``number`` of them.

    dtype: "float32" or "bfloat16". The last axis takes whole registers of lanes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    number: int = 1

    @property
    def bytes(self) -> int:
        """The bytes of all of them together."""
        return self.number * prod(self.shape[:-1]) * whole_lanes(self.shape[-1]) * _BYTES[self.dtype]


def bytes_of(buffers: Iterable[Buffer]) -> int:
    """The bytes that some buffers take together."""
    return sum(buffer.bytes for buffer in buffers)
