"""How a call is cut for the kernel: tokens a chunk, heads a grid step, and whether that fits into VMEM. No jax here."""

from __future__ import annotations

from typing import NamedTuple

from ..spec.problem import Signature
from ..spec.variants import VARIANTS, Granularity

__all__ = ["CHUNK", "TABLE_LIMIT", "VMEM_LIMIT", "Core", "Pipeline", "Plan", "backward_plan", "pipeline", "plan"]

#: Tokens a chunk: an MXU's side (v5e, v5p) or half of it (v6e, v7x), and as many as lanes: scores fill registers.
CHUNK = 128
#: Below 16 rows a tile of bfloat16 would not be filled.
SHORTEST = 16
#: Value heads that share a grid step, at most: enough independent chains to hide one behind the other, and a program
#: that still compiles in seconds.
HEADS = 8
#: Bytes of VMEM that a grid step may use: v5p and v7x have 64 MiB a core, and the compiler wants some for itself.
VMEM_LIMIT = 48 << 20
#: Bytes of scalar memory that the table of chunks may use; a core has 1 MiB.
TABLE_LIMIT = 768 << 10
LANES = 128


class Widths(NamedTuple):
    """How finely gates are given: decays a value head (1, a few groups, or K), erase gates (0, 1 or K), write gates (0,
    1 or V); shared: both are one gate, beta."""

    decay: int
    erase: int
    write: int
    shared: bool

    @property
    def given(self) -> tuple[int, ...]:
        """Of the operands, in order: decay, and erase and write where they are operands of their own."""
        return (self.decay, *(n for n in (self.erase, 0 if self.shared else self.write) if n))


#: Groups of channels up to which each has a matrix of decays of its own; more are computed channel by channel.
GROUPS = 4


def widths(s: Signature) -> Widths:
    """Of a call."""
    decay = max(s.groups, 1)
    erase, write = (
        {Granularity.NONE: 0, Granularity.HEAD: 1}.get(gate, channels)
        for gate, channels in ((s.variant.erase, s.K), (s.variant.write, s.V))
    )
    return Widths(decay if decay <= GROUPS else s.K, erase, write, s.has("beta"))


class Plan(NamedTuple):
    """The kernel's static numbers.

    B rows, T tokens, N states, H key heads, R value heads a key head, K and V channels, C tokens a chunk (a power of
    two), P key heads a grid step; ``q_bytes`` and ``v_bytes`` an element of q, k and of v, o; scale and precision.
    """

    B: int
    T: int
    N: int
    H: int
    R: int
    K: int
    V: int
    C: int
    P: int
    q_bytes: int
    v_bytes: int
    scale: float
    precision: str
    packed: bool
    widths: Widths

    @property
    def heads(self) -> int:
        """Value heads a grid step."""
        return self.P * self.R

    @property
    def groups(self) -> int:
        """Groups of heads, the grid's first dimension."""
        return self.H // self.P

    @property
    def blocks(self) -> int:
        """Blocks of C tokens a row; the last one may reach beyond T."""
        return -(-self.T // self.C)

    @property
    def chunks(self) -> int:
        """Entries of the table, the grid's second dimension: a boundary cuts a block in two at most once each."""
        return self.blocks + self.N - 1 if self.packed else self.B * self.blocks

    @property
    def vmem(self) -> int:
        """Estimated bytes of VMEM a grid step: blocks twice (they are fetched ahead), scratch, and values."""
        lanes = lambda n: -(-n // LANES) * LANES  # noqa: E731
        C, heads = self.C, self.heads
        tokens = C * (2 * lanes(self.P * self.K) * self.q_bytes + 2 * lanes(heads * self.V) * self.v_bytes)
        gates = 4 * C * sum(lanes(heads * n) for n in self.widths.given)
        state = heads * self.K * lanes(self.V) * 4
        keys = 3 if self.widths.decay == 1 else 12
        values = heads * C * (8 * lanes(C) + keys * lanes(self.K) + 6 * lanes(self.V)) * 4
        return 2 * (tokens + gates + 2 * state) + state + values + 2 * state

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of chunks."""
        return 20 * self.chunks


class _Backward(Plan):
    """The same of the backward kernel, whose chunks are those that states were kept of."""

    @property
    def vmem(self) -> int:
        """Estimated bytes of VMEM a grid step, as for ``Plan``."""
        lanes = lambda n: -(-n // LANES) * LANES  # noqa: E731
        C, heads, keys, values = self.C, self.heads, lanes(self.K), lanes(self.V)
        tokens = C * (lanes(self.P * self.K) * (2 * self.q_bytes + 8) + 3 * lanes(heads * self.V) * 4)
        gates = 4 * C * lanes(heads) * 4
        state = heads * self.K * values * 4
        return 2 * (tokens + gates + 3 * state) + 4 * state + heads * C * (14 * lanes(C) + 6 * keys + 8 * values) * 4


def plan(s: Signature, kind: type[Plan] = Plan) -> Plan:
    """The plan of a call: the longest chunks that fit, unless the call names their length, and then the most heads.

    Whoever runs it checks ``vmem`` and ``table_bytes`` first: where nothing fits, this is the smallest there is.
    """
    size = min(s.chunk_size or CHUNK, max(SHORTEST, 1 << (s.T - 1).bit_length()))
    while True:
        choices = [kind(*_plan(s, size, P)) for P in range(1, s.H + 1) if _legal(s, P)]
        fits = [p for p in choices if p.vmem <= VMEM_LIMIT]
        if fits:
            few = [p for p in fits if p.heads <= HEADS]
            return few[-1] if few else fits[0]
        if s.chunk_size is not None or size == SHORTEST:
            return choices[0]
        size //= 2


def backward_plan(s: Signature) -> Plan | None:
    """The plan of a call for the backward kernel, or None where there is none for it."""
    if widths(s) != Widths(1, 1, 1, True):
        return None
    p = plan(s, _Backward)
    return p if p.vmem <= VMEM_LIMIT and p.table_bytes <= TABLE_LIMIT else None


def _legal(s: Signature, P: int) -> bool:
    """Whether P key heads may share a block: whole registers of lanes, or the whole array."""
    widths = (P * s.K, P * (s.HV // s.H) * s.V)
    return s.H % P == 0 and (s.H == P or all(width % LANES == 0 for width in widths))


def _plan(s: Signature, size: int, P: int) -> Plan:
    return Plan(
        B=s.B,
        T=s.T,
        N=s.N,
        H=s.H,
        R=s.HV // s.H,
        K=s.K,
        V=s.V,
        C=size,
        P=P,
        q_bytes=4 if s.precision == "highest" else 2,  # products round q and k to bfloat16, or nothing
        v_bytes=2 if s.dtype == "bfloat16" and s.conv is None else 4,  # v is in sums, and kept as it is
        scale=s.scale,
        precision=s.precision,
        packed=s.packed,
        widths=widths(s),
    )


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
        """Of its tiles."""
        return self.tiles * LANES

    @property
    def whole(self) -> bool:
        """Whether no lane belongs to a neighbour."""
        return (self.low, self.high) == (0, self.lanes)


def spans(heads: int, width: int) -> tuple[Span, ...]:
    """Of heads of ``width`` channels side by side."""
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
    256 x 256; starts: whether packed sequences begin from states that are given; every: whether the states before each
    chunk are returned; inside: what is done before the rule.
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
    every: bool
    inside: Inside

    @property
    def packed(self) -> bool:
        """Whether sequences are packed in one row: each chunk has its own place in the table of chunks."""
        return self.N > 0

    @property
    def summands(self) -> int:
        """Arrays that add up to an operand of a product, where it is not an input."""
        return 2 if self.precision == "default" else 1

    @property
    def keeps_keys(self) -> bool:
        """Whether q and k are kept from one phase to another, since they are not what lies in HBM."""
        return self.inside.norm or self.inside.width > 0

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
        """Of the key head with the most tiles."""
        return max(span.lanes for span in self.keys)

    @property
    def value_lanes(self) -> int:
        """Of the value head with the most tiles."""
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
        """Bytes of VMEM: blocks twice, scratch, and what the compiler spills."""
        square, kept = CHUNK * CHUNK, 4 if self.precision == "highest" else 2
        key_tiles, value_tiles = self.P * self.K // LANES, self.heads * self.V // LANES
        K, V = self.key_lanes, self.value_lanes
        state = self.heads * self.K * -(-self.V // LANES) * LANES * 4
        tokens = self.U * square
        blocks = tokens * (4 * key_tiles * self.k_bytes + 2 * value_tiles * self.v_bytes)
        blocks += state * ((self.U if self.starts else 0) if self.packed else 2)
        blocks += state * self.U if self.every else 0
        slot = self.heads * (self.summands * kept * CHUNK * (CHUNK + K + CHUNK + 112) + 16 * CHUNK * 4) + square * 2
        slot += 2 * kept * self.P * CHUNK * K if self.keeps_keys else 0
        if self.inside.width:
            slot += 4 * self.heads * CHUNK * V + 4 * (2 * key_tiles + value_tiles) * square
        scratch = self.heads * K * V * 4 * (self.U if self.packed else 1)
        if self.packed:
            scratch += self.U * value_tiles * square * self.v_bytes
        spilled = self.heads * square * 16 * (1 + 2 * self.summands * (kept // 2)) * max(K, V) // LANES
        return 2 * blocks + self.U * slot + scratch + spilled


#: Chunks of a grid step of the pipeline: at least its depth.
UNITS = 4
#: Tokens from which on it costs less than the other kernel, which works on no chunk that is not there.
SHORTEST_ROW = 2 * CHUNK + 1


def _inside(s: Signature) -> Inside:
    """Everything, unless there is a mask: then the specification's prologue comes first, and nothing is left."""
    if s.has("mask"):
        return Inside(0, False, False, False, False, None)
    width, silu = (0, False) if s.conv is None else (s.conv.width, s.conv.activation == "silu")
    return Inside(
        width, s.has("conv_bias"), silu, s.qk_l2norm, s.gate is not None, None if s.gate is None else s.gate.lower_bound
    )


class Core(NamedTuple):
    """Of the chip that is compiled for: side of a matrix unit, cores of a device, bytes of VMEM."""

    mxu_side: int = 256
    cores: int = 1
    vmem: int = 64 << 20


def pipeline(s: Signature, core: Core, every: bool = False) -> Pipeline | None:
    """The plan of a call for the pipelined kernel, or None where that cannot run it or is not worth it.

    ``every``: with the state before each chunk.
    """
    if s.variant not in (VARIANTS["GDN"], VARIANTS["DeltaNet"]) or not s.has("beta"):
        return None
    if s.chunk_size not in (None, CHUNK) or s.T < SHORTEST_ROW or s.has("segment_ids"):
        return None
    if s.conv is not None and (s.has("mask") or not 2 <= s.conv.width <= 8):
        return None
    for P in range(min(s.H, HEADS * s.H // s.HV), 0, -1):
        p = _pipeline(s, core, P, every) if s.H % P == 0 else None
        if p is not None and p.vmem <= core.vmem and p.table_bytes <= TABLE_LIMIT:
            return p
    return None


def _pipeline(s: Signature, core: Core, P: int, every: bool) -> Pipeline | None:
    """With P key heads a grid step, if their channels and those of their value heads are whole tiles."""
    R, groups = s.HV // s.H, s.H // P
    if P * s.K % LANES or P * R * s.V % LANES:
        return None
    return Pipeline(
        B=s.B,
        T=s.T,
        K=s.K,
        V=s.V,
        N=s.N if s.packed else 0,
        P=P,
        R=R,
        U=UNITS,
        groups=groups,
        parts=core.cores if s.B * groups % core.cores == 0 else 1,
        precision=s.precision,
        scale=s.scale,
        k_bytes=2 if s.precision != "highest" or s.dtype == "bfloat16" else 4,
        v_bytes=2 if s.dtype == "bfloat16" else 4,
        wide_mxu=core.mxu_side == 256,
        starts=s.packed and (s.has("initial_state") or s.has("conv_state")),
        every=every,
        inside=_inside(s),
    )
