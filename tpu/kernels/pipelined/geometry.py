"""How a call is laid out in the pipelined kernel's grid: heads in tiles, and tokens in grid steps, without jax."""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import NormKind
from ..common.gate_widths import Widths
from ..common.tiles import CHUNK, LANES

__all__ = ["Inside", "Pipeline", "Span", "spans"]


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
    of "S", the state before it, "M", its inverse, "u" and "Aqk", and "o", the output before the norm; inside: what is
    done before the rule; widths of gates; norm of the output, where it is inside, and the bytes of an element of its z.
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
    norm: NormKind | None = None
    z_bytes: int = 0

    @property
    def by_channel(self) -> bool:
        """Whether decays are given channel by channel, and not once per head."""
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
