"""A call that is split over a mesh, as the static argument of the program that computes it."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.problem import Options, Signature
from .placement import Split

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """A call that is split, without its arrays; hashable, so that it can be the static argument of a compiled function.

    Attributes:
        signature: the whole call.
        options: as the caller gave them.
        backend: the name that each device's call asks for, or None.
        counts_axes: whether that backend may be traced where ``shard_map`` counts the axes that values vary over.
        split: over which mesh, and how.
        every: tokens between the states that are returned on the way, or None.
    """

    signature: Signature
    options: Options
    backend: str | None
    counts_axes: bool
    split: Split
    every: int | None
