"""The description of a split call, which is a static argument of the program that computes it."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.problem import Options, Signature
from .placement import Split

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """A split call without its arrays; hashable, so that it can be a static argument of a compiled function.

    Attributes:
        signature: The signature of the whole call.
        options: The caller's options.
        backend: The name of the backend for each device's call, or None.
        counts_axes: Whether that backend can be traced while ``shard_map`` tracks the axes over which values vary.
        split: How the call is split.
        every: The number of tokens between intermediate states, or None.
    """

    signature: Signature
    options: Options
    backend: str | None
    counts_axes: bool
    split: Split
    every: int | None
