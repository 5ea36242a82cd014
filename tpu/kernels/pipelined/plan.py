"""The plan of the pipelined kernel: how many heads share a grid step, and whether they fit into VMEM, without jax."""

from __future__ import annotations

from math import ceil

from ....spec.problem import Signature
from ...chips import Chip
from ...tiling import Entry, best
from ..common.gate_widths import widths
from ..common.tiles import CHUNK, LANES
from ..plain.plan import TABLE_LIMIT, plan
from .geometry import Inside, Pipeline
from .vmem import vmem

__all__ = [
    "UNITS",
    "Inside",
    "Pipeline",
    "describe",
    "norm_inside",
    "pipeline",
    "prepared_outside",
    "tiled",
    "why_not",
]


#: Chunks of a grid step of the pipeline: at least its depth.
UNITS = 4
#: Bytes of VMEM that a chip must have: with a v4's 16 MiB the compiler finds no room for what it spills.
LEAST_VMEM = 32 << 20
#: Tokens from which on it costs less than the other kernel, which works on no chunk that is not there.
SHORTEST_ROW = 2 * CHUNK + 1


def prepared_outside(s: Signature) -> bool:
    """Whether the specification's prologue comes before the kernel, and leaves it the bare rule."""
    return s.has("mask") or s.has("segment_ids")


def _inside(s: Signature) -> Inside:
    """What of a call's prologue is done in the kernel."""
    if prepared_outside(s):
        return Inside(0, False, False, False, False, None)
    width, silu = (0, False) if s.conv is None else (s.conv.width, s.conv.activation == "silu")
    return Inside(
        width, s.has("conv_bias"), silu, s.qk_l2norm, s.gate is not None, None if s.gate is None else s.gate.lower_bound
    )


#: Widths of erase and write gates, and whether they are one, beside decays by channel.
_BY_CHANNEL = ((1, 1, True), (CHUNK, CHUNK, False), (0, 0, False))
#: Value heads a grid step, at most, where decays are by channel.
CHANNEL_HEADS = 8


def norm_inside(s: Signature) -> bool:
    """Whether the pipelined kernel does a call's output norm itself: where heads are whole tiles."""
    return s.norm is not None and not prepared_outside(s) and s.V % LANES == 0


def why_not(s: Signature) -> str | None:
    """Why the pipelined kernel is not for a call, whatever the chip, or None."""
    w = widths(s)
    if w.decay < s.K and not s.has("beta"):
        return "the pipelined kernel has one decay and one beta a head"
    if 1 < w.decay < s.K and s.K // w.decay % LANES:
        return f"groups of {s.K // w.decay} channels are no tiles of {LANES} lanes"
    by_channel = w.decay == s.K
    if by_channel and (s.K, s.V) != (CHUNK, CHUNK):
        return "the pipelined kernel takes decays by channel of heads of 128 x 128"
    if by_channel and (w.erase, w.write, w.shared) not in _BY_CHANNEL:
        return "the pipelined kernel takes beta, erase and write gates by channel, or neither beside decays by channel"
    if by_channel and s.precision == "highest":
        return "the pipelined kernel does not take precision 'highest' with decays by channel"
    if s.chunk_size not in (None, CHUNK):
        return f"chunk_size is {s.chunk_size}, and the pipelined kernel's chunks have {CHUNK} tokens"
    if s.T < SHORTEST_ROW:
        return f"T is {s.T}, and the pipelined kernel is worth it from {SHORTEST_ROW} on"
    if s.conv is not None and not prepared_outside(s) and not 2 <= s.conv.width <= 8:
        return f"the convolution is {s.conv.width} wide, and the pipelined kernel has 2 to 8 inside"
    if not any(_whole(s, P) for P in _divisors(s)):
        return f"no number of heads with {s.K} and {s.V} channels fills tiles of {LANES} lanes"
    return None


def pipeline(s: Signature, chip: Chip, keeps: tuple[str, ...] = ()) -> Pipeline | None:
    """The plan of a call for the pipelined kernel, or None where that cannot run it or is not worth it.

    As many heads share a grid step as ``tiling`` found best, or as VMEM holds, or fewer, if cores would be idle.
    ``keeps``: as in ``Pipeline``.
    """
    if why_not(s) is not None or chip.vmem_bytes < LEAST_VMEM:
        return None
    most = CHANNEL_HEADS if widths(s).decay == s.K else tiled(s, chip).heads
    plans = [_pipeline(s, chip, P, keeps) for P in _divisors(s) if most >= P * (s.HV // s.H) and _whole(s, P)]
    fit = [p for p in plans if vmem(p) <= chip.vmem_bytes and p.table_bytes <= TABLE_LIMIT]
    return min(fit, key=lambda p: p.P * ceil(s.B * s.H / p.P / chip.cores), default=None)  # the first of equals


def describe(s: Signature, chip: Chip) -> str:
    """Which kernel a call gets, in one line."""
    p, why = pipeline(s, chip), why_not(s)
    if p is None:
        q = plan(s, chip)
        why = why or f"not even one key head's step fits into {chip.vmem_bytes >> 20} MiB of VMEM"
        return f"plain kernel, {q.heads} value heads and a chunk of {q.C} tokens a grid step ({why})"
    found = tiled(s, chip)
    if p.by_channel:
        return f"pipelined kernel, {p.heads} value heads and {p.U} chunks of {CHUNK} tokens a grid step, by channel"
    most = (
        f"up to {found.heads} are best where it was compiled: {found}" if found.cycles else "as many as were asked for"
    )
    return f"pipelined kernel, {p.heads} value heads and {p.U} chunks of {CHUNK} tokens a grid step ({most})"


def tiled(s: Signature, chip: Chip) -> Entry:
    """The compiled schedule that a call's plan goes by."""
    inside = s.conv is not None or s.qk_l2norm
    return best(chip.name, s.precision, inside, s.K, s.V)


def _divisors(s: Signature) -> list[int]:
    """Numbers of key heads that may share a grid step, the most first."""
    return [P for P in range(s.H, 0, -1) if s.H % P == 0]


def _whole(s: Signature, P: int) -> bool:
    """Whether the channels of so many key heads, and those of their value heads, are whole tiles."""
    return P * s.K % LANES == 0 and P * (s.HV // s.H) * s.V % LANES == 0


def _pipeline(s: Signature, chip: Chip, P: int, keeps: tuple[str, ...]) -> Pipeline:
    groups = s.H // P
    inside = norm_inside(s)
    return Pipeline(
        B=s.B,
        T=s.T,
        K=s.K,
        V=s.V,
        N=s.N if s.packed else 0,
        P=P,
        R=s.HV // s.H,
        U=UNITS,
        groups=groups,
        parts=chip.cores if s.B * groups % chip.cores == 0 else 1,
        precision=s.precision,
        scale=s.scale,
        k_bytes=2 if s.precision != "highest" or s.dtype == "bfloat16" else 4,
        v_bytes=2 if s.dtype == "bfloat16" and not (prepared_outside(s) and s.conv is not None) else 4,
        wide_mxu=chip.mxu_side == 256,
        starts=s.packed and (s.has("initial_state") or s.has("conv_state")),
        keeps=(*keeps, "o") if inside and keeps else keeps,
        inside=_inside(s),
        widths=widths(s),
        norm=s.norm if inside else None,
        z_bytes=0 if not s.has("z") else 2 if s.dtype == "bfloat16" else 4,
    )
