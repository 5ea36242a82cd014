"""Which layers of a model repeat, so that one compiled period serves them all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["bodies", "find_period"]


def find_period(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """The stretch of layers that leaves the fewest to compile.

    Args:
        kinds: of the layers; those that are equal compute the same of other weights.

    Returns:
        The first layer of the stretch, the layers of its period, and how often it is repeated; (number of layers, 0, 0)
        where nothing is.
    """
    n = len(kinds)
    best, cost = (n, 0, 0), n
    for start in range(n):
        for length in range(1, (n - start) // 2 + 1):
            end = start + length
            while end < n and kinds[end] == kinds[end - length]:
                end += 1
            repeats = (end - start) // length
            left = n - length * (repeats - 1)
            if repeats > 1 and left < cost:
                best, cost = (start, length, repeats), left
    return best


def bodies(kinds: Sequence[Hashable], scan: bool) -> tuple[tuple[int, ...], ...]:
    """For each layer that is compiled, the numbers of those that it stands for: several within the period, whose
    weights lie in one array, else one."""
    start, length, repeats = find_period(kinds) if scan else (len(kinds), 0, 0)
    inside = [tuple(range(start + j, start + length * repeats, length)) for j in range(length)]
    after = range(start + length * repeats, len(kinds))
    return (*((i,) for i in range(start)), *inside, *((i,) for i in after))
