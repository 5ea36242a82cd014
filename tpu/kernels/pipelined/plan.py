"""The plan of the pipelined kernel: where heads lie in tiles, how many share a grid step, and whether that fits into
VMEM. No jax here."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ....spec.problem import Signature
from ...chips import Chip
from ...tiling import Entry, best
from ..common.gate_widths import Widths, widths
from ..common.tiles import CHUNK, LANES
from ..plain.plan import TABLE_LIMIT, plan
from . import vmem

__all__ = [
    "UNITS",
    "Inside",
    "Pipeline",
    "Span",
    "describe",
    "pipeline",
    "prepared_outside",
    "spans",
    "tiled",
    "why_not",
]


class Inside(NamedTuple):
    """What of a call's prologue the pipelined kernel does itself.

    width of the convolution, 0 without one; its bias; silu behind it; norm: l2norm of q and k; gate: g is a raw
    projection, and lower_bound that of a bounded gate.
    """

    width: int
    bias: bool
    silu: bool
    norm: bool
    gate: bool
    lower_bound: float | None


class Span(NamedTuple):
    """Where a head's channels lie: ``tiles`` whole tiles of lanes from ``first`` on, and in those lanes low to high.

    Kernels work on whole tiles as they lie, and channels of neighbours in them are masked: nothing is moved.
    """

    first: int
    tiles: int
    low: int
    high: int

    @property
    def lanes(self) -> int:
        """The lanes of its tiles."""
        return self.tiles * LANES

    @property
    def whole(self) -> bool:
        """Whether no lane belongs to a neighbour."""
        return (self.low, self.high) == (0, self.lanes)


def spans(heads: int, width: int) -> tuple[Span, ...]:
    """The span of each of some heads of ``width`` channels side by side."""
    found = []
    for begin in range(0, heads * width, width):
        first = begin // LANES
        tiles = -(-(begin + width) // LANES) - first
        found.append(Span(first, tiles, begin - first * LANES, begin - first * LANES + width))
    return tuple(found)


class Pipeline(NamedTuple):
    """The static numbers of the pipelined kernel.

    B rows, T tokens, K and V channels; N states of packed sequences, or 0 where rows are sequences; P key heads and R
    value heads a key head in a grid step, U chunks of 128 tokens in it; groups of heads; parts that cores share;
    precision; scale; k_bytes and v_bytes of an element of q and k, and of v and o; wide_mxu: whether matrix units are
    256 x 256; starts: whether packed sequences begin from states that are given; keeps: what is returned of each chunk,
    of "S", the state before it, "M", its inverse, "u" and "Aqk"; inside: what is done before the rule; widths of gates.
    """

    B: int
    T: int
    K: int
    V: int
    N: int
    P: int
    R: int
    U: int
    groups: int
    parts: int
    precision: str
    scale: float
    k_bytes: int
    v_bytes: int
    wide_mxu: bool
    starts: bool
    keeps: tuple[str, ...]
    inside: Inside
    widths: Widths

    @property
    def by_channel(self) -> bool:
        """Whether decays are given channel by channel, and not once a head."""
        return self.widths.decay == self.K

    @property
    def decays(self) -> int:
        """Decays of a head, each of as many whole tiles of channels, where they are not by channel."""
        return 1 if self.by_channel else self.widths.decay

    @property
    def packed(self) -> bool:
        """Whether sequences are packed in one row: each chunk has its own place in the table of chunks."""
        return self.N > 0

    @property
    def summands(self) -> int:
        """Arrays that add up to an operand of a product, where it is not an input."""
        return 2 if self.precision == "default" else 1

    @property
    def changes_keys(self) -> bool:
        """Whether q and k are not what lies in HBM."""
        return self.inside.norm or self.inside.width > 0

    @property
    def keeps_values(self) -> bool:
        """Whether what is written is kept from one phase to another, since it is not v as it lies in HBM."""
        return self.inside.width > 0 or self.widths.write > 1

    @property
    def heads(self) -> int:
        """Value heads a grid step."""
        return self.P * self.R

    @property
    def keys(self) -> tuple[Span, ...]:
        """Where each key head of a grid step lies."""
        return spans(self.P, self.K)

    @property
    def values(self) -> tuple[Span, ...]:
        """Where each value head of a grid step lies."""
        return spans(self.heads, self.V)

    @property
    def key_lanes(self) -> int:
        """The lanes of the key head with the most tiles."""
        return max(span.lanes for span in self.keys)

    @property
    def value_lanes(self) -> int:
        """The lanes of the value head with the most tiles."""
        return max(span.lanes for span in self.values)

    @property
    def blocks(self) -> int:
        """Chunks of a row."""
        return -(-self.T // CHUNK)

    @property
    def chunks(self) -> int:
        """Entries of the table of chunks: a boundary cuts a block in two at most once each; whole grid steps."""
        return self.steps * self.U

    @property
    def C(self) -> int:
        """Tokens a chunk."""
        return CHUNK

    @property
    def steps(self) -> int:
        """Grid steps of a row and a group of heads."""
        return -(-(self.blocks + max(self.N - 1, 0)) // self.U)

    @property
    def whole_steps(self) -> bool:
        """Whether what is kept is of the chunks of whole grid steps, row by row, and not of the table's entries."""
        return "M" in self.keeps and not self.by_channel

    @property
    def entries(self) -> int:
        """Grid steps of a part that read new tokens; one more drains the pipeline."""
        return self.B * self.groups // self.parts * self.steps

    @property
    def masked(self) -> bool:
        """Whether there are chunks with rows that are not theirs."""
        return self.packed or self.T % (self.U * CHUNK) != 0

    @property
    def table_bytes(self) -> int:
        """Bytes of scalar memory that the table of chunks takes."""
        return 20 * self.chunks if self.packed else 0

    @property
    def vmem(self) -> int:
        """Bytes of VMEM a grid step, estimated."""
        return vmem.vmem(self)


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
    ``keeps``: as of ``Pipeline``.
    """
    if why_not(s) is not None or chip.vmem_bytes < LEAST_VMEM:
        return None
    most = CHANNEL_HEADS if widths(s).decay == s.K else tiled(s, chip).heads
    plans = [_pipeline(s, chip, P, keeps) for P in _divisors(s) if most >= P * (s.HV // s.H) and _whole(s, P)]
    fit = [p for p in plans if p.vmem <= chip.vmem_bytes and p.table_bytes <= TABLE_LIMIT]
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
        keeps=keeps,
        inside=_inside(s),
        widths=widths(s),
    )
