"""The plan of the kernel for an output norm's cotangents, and who computes the norm of a call, without jax."""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import NormKind, Signature
from ...chips import Chip
from ..common.tiles import LANES
from ..pipelined.backward_plan import reverse_plan
from ..pipelined.plan import norm_inside, pipeline, prepared_outside

__all__ = ["Epilogue", "describe_norm", "epilogue_plan"]

#: Tokens and channels of a block, at most.
TOKENS, CHANNELS = 512, 2048


class Epilogue(NamedTuple):
    """The static numbers of the kernel: B rows, T tokens, V channels a head, and those of all heads; R tokens and L
    channels a block; the norm; packed: whether sequences may end before T; vmem: bytes that the compiler may use."""

    B: int
    T: int
    V: int
    channels: int
    R: int
    L: int
    norm: NormKind
    packed: bool
    vmem: int


def epilogue_plan(s: Signature, chip: Chip) -> Epilogue | None:
    """The plan of a call, or None where XLA derives these cotangents: with a mask or segments, or where heads are no
    whole tiles."""
    if s.norm is None or s.V % LANES or prepared_outside(s):
        return None
    rows, channels = min(TOKENS, -(-s.T // 16) * 16), s.HV * s.V
    memory = lambda L: 2 * rows * L * 4 * 5 + (6 << 20)  # noqa: E731
    widths = [n for n in range(s.V, max(CHANNELS, s.V) + 1, s.V) if channels % n == 0]
    L = max((n for n in widths if memory(n) <= chip.vmem_bytes // 2), default=widths[0])
    return Epilogue(s.B, s.T, s.V, channels, rows, L, s.norm, s.packed, memory(L))


def describe_norm(s: Signature, chip: Chip) -> str:
    """Who computes a call's output norm and its cotangents, in a few words; "" where there is none."""
    if s.norm is None:
        return ""
    where = "inside the forward kernel" if norm_inside(s) and pipeline(s, chip) is not None else "by xla"
    if reverse_plan(s, chip) is not None and norm_inside(s):
        return f"output norm {where}, its gradients inside the backward kernel"
    if epilogue_plan(s, chip) is not None:
        return f"output norm {where}, its gradients in a kernel of their own"
    why = "there is a mask or segments" if prepared_outside(s) else f"heads of {s.V} channels are no whole tiles"
    return f"output norm {where}, its gradients by xla, since {why}"
