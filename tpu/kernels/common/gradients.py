"""What the backward kernels of both kinds return."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["RuleGradients"]

Array = Any


class RuleGradients(NamedTuple):
    """Cotangents of the bare rule's operands, in the shapes that the forward kernels take them.

    q, k: [B, T, H, K]. v: [B, T, HV, V]. gates: of the log decay, and of the erase and the write gate where they are
    operands, [B, T, HV, width] float32. S: of the states that sequences start from, [N, HV, K, V] float32.
    """

    q: Array
    k: Array
    v: Array
    gates: tuple[Array, ...]
    S: Array
