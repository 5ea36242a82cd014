"""A slice of TPU chips: the positions of its devices, and a prediction of how long a collective takes.

The prediction models bandwidth. Each message travels along one axis of the torus after the other, in the shorter
direction, and the busiest link determines the time; each hop adds its latency. Messages between two devices of one chip
are not counted. This module does not import jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..spec.errors import bad
from .chips import Chip

__all__ = ["HOP_SECONDS", "Slice", "slice_of"]

#: What a message takes from a chip to its neighbour, whatever its size.
HOP_SECONDS = 1e-6
#: Chips along an axis from which on it is closed to a ring: of a torus in two dimensions, and in three.
_RING = {2: 16, 3: 4}

Place = tuple[int, ...]


class Slice(NamedTuple):
    """A slice with a number of chips along each axis."""

    chip: Chip
    shape: Place

    @property
    def topology(self) -> str:
        """libtpu's name of the slice."""
        return f"{self.chip.topology.partition(':')[0]}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """The number of devices of all chips."""
        return math.prod(self.shape) * self.chip.devices

    def place(self, device: int) -> Place:
        """Return the chip of a device; consecutive devices are on the same chip or on neighbours."""
        number, place = device // self.chip.devices, []
        for size in self.shape:
            turn, number = number % size, number // size
            place.append(turn if number % 2 == 0 else size - 1 - turn)
        return tuple(place)

    def order(self, places: Sequence[tuple[Sequence[int], int]]) -> list[int]:
        """Return the devices' numbers in the order of ``place``, given each device's chip and its number there."""
        wanted = {self.place(d * self.chip.devices): d for d in range(math.prod(self.shape))}
        rank = [wanted[tuple(chip[: len(self.shape)])] * self.chip.devices + core for chip, core in places]
        return sorted(range(len(rank)), key=rank.__getitem__)

    def _ring(self, axis: int) -> bool:
        size = self.shape[axis]
        return size >= _RING[len(self.shape)] and size % _RING[len(self.shape)] == 0

    def _way(self, a: Place, b: Place) -> Iterator[tuple[Place, int, int]]:
        """Yield the links from one chip to another: the chip that each leaves, the axis and the direction."""
        at = list(a)
        for axis, size in enumerate(self.shape):
            ahead = (b[axis] - at[axis]) % size
            direct = b[axis] - at[axis]
            step = (1 if 2 * ahead <= size else -1) if self._ring(axis) else (1 if direct > 0 else -1)
            while at[axis] != b[axis]:
                yield tuple(at), axis, step
                at[axis] = (at[axis] + step) % size

    def _sent(self, messages: Sequence[tuple[int, int]], size: float) -> float:
        """Return the seconds that simultaneous messages of the given sizes take."""
        loads: Counter[tuple[Place, int, int]] = Counter()
        hops = 0
        for a, b in messages:
            way = list(self._way(self.place(a), self.place(b)))
            hops = max(hops, len(way))
            loads.update(way)
        return max(loads.values(), default=0) * size / self.chip.ici_bytes_per_second + hops * HOP_SECONDS

    def _gathered(self, groups: Sequence[Sequence[int]], size: float) -> float:
        """Return the seconds in which each member of a group receives the parts of all others, ``size`` bytes in total.

        The chip with the fewest links along the group's axes determines the time; a chip at the end of a line has one.
        """
        worst, hops = 0.0, 0
        for group in groups:
            chips = {self.place(d) for d in group}
            wide = [axis for axis in range(len(self.shape)) if len({c[axis] for c in chips}) > 1]
            if not wide:
                continue
            links = sum(2 if self._ring(axis) else 1 for axis in wide)
            beside = sum(not chips.isdisjoint({self.place(d) for d in g}) for g in groups)
            worst = max(worst, beside * size * (1 - 1 / len(chips)) / links)
            reach = [max(c[axis] for c in chips) - min(c[axis] for c in chips) for axis in wide]
            hops = max(hops, sum(math.ceil(n / 2) if self._ring(a) else n for a, n in zip(wide, reach, strict=True)))
        return worst / self.chip.ici_bytes_per_second + hops * HOP_SECONDS

    def seconds(self, kind: str, size: float, groups: Sequence[Sequence[int]]) -> float:
        """Return the seconds that one collective takes.

        Args:
            kind: "all-to-all", "collective-permute", "all-gather", "reduce-scatter" or "all-reduce".
            size: bytes that each device has of it: sent to others or kept; of a gather those that it ends with, of a
                scatter those that it begins with.
            groups: devices that take part together; of a permute (from, to) each.
        """
        if kind == "collective-permute":
            return self._sent([(a, b) for a, b in groups if a != b], size)
        if kind == "all-to-all":
            pairs = [(a, b) for group in groups for a in group for b in group if a != b]
            return self._sent(pairs, size / max(1, len(groups[0])) if groups else 0.0)
        return self._gathered(groups, size) * (2 if kind == "all-reduce" else 1)


def slice_of(chip: Chip, chips: int) -> Slice:
    """Return the usual slice with this number of chips: as close to a square or a cube as a power of two allows.

    Raises:
        GdnError: No such slice has this number of chips.
    """
    if chips < 1 or chips & (chips - 1):
        raise bad("chips", chips, "be 1, 2, 4 or another power of two")
    power = chips.bit_length() - 1
    if chip.topology.count("x") == 1:
        return Slice(chip, (1 << power // 2, 1 << power - power // 2))
    if chips == 4:
        return Slice(chip, (2, 2, 1))
    if chips == 16:
        return Slice(chip, (2, 2, 4))
    return Slice(chip, (1 << power // 3, 1 << (power + 1) // 3, 1 << (power + 2) // 3))
