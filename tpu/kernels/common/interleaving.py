"""Work of several heads and chunks in program order side by side.

The matrix unit takes products in program order, and one chain of dependent products leaves it idle most of the time. So
what a kernel does is written as generators that stop where a product's result is awaited, and these take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Deferred", "interleave"]


def interleave(parts: Iterable[Iterator[Any]]) -> list[Any]:
    """Run generators to their ends by turns, one step of each a round, and return what each of them returned."""
    going = dict(enumerate(parts))
    results = [None] * len(going)
    while going:
        for number, part in list(going.items()):
            try:
                next(part)
            except StopIteration as end:
                results[number] = end.value
                del going[number]
    return results


class Deferred:
    """Actions of one generator that are to wait until so many of its rounds have passed."""

    def __init__(self) -> None:
        self._round = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def until(self, round: int, action: Callable[[], None]) -> None:
        """Put off an action; later ones wait at least as long as earlier ones."""
        self._waiting.append((round, action))

    def next_round(self) -> None:
        """Count a round, and do what has waited for it."""
        self._round += 1
        while self._waiting and self._waiting[0][0] <= self._round:
            self._waiting.pop(0)[1]()
