"""Find the layers of a model that repeat, so that one compiled period serves all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["bodies", "find_period"]


def find_period(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Find the range of repeated layers that leaves the fewest layers to compile.

    Args:
        kinds: The kinds of the layers; layers of equal kind differ only in their weights.

    Returns:
        The first layer of the range, the number of layers in a period, and the number of repetitions; (number of
        layers, 0, 0) if no layers repeat.
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
