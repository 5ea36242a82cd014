"""How a call is cut: tokens per chunk, heads per grid step, and whether that fits into VMEM, without jax."""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import Signature
from ...chips import Chip
from ..common.buffers import Buffer, bytes_of
from ..common.gate_widths import ONE_GATE, Widths, widths
from ..common.tiles import CHUNK, LANES

__all__ = ["TABLE_LIMIT", "Plan", "backward_plan", "plan"]

#: Below 16 rows a tile of bfloat16 would not be filled.
SHORTEST = 16
#: Value heads that share a grid step, at most: enough independent chains to hide one behind the other, and a program
#: that still compiles in seconds.
HEADS = 8
#: Bytes of scalar memory that the table of chunks may use; a core has 1 MiB.
TABLE_LIMIT = 768 << 10


class Plan(NamedTuple):
    """The kernel's static numbers.

    B rows, T tokens, N states, H key heads, R value heads a key head, K and V channels, C tokens a chunk (a power of
    two), P key heads a grid step; ``q_bytes`` and ``v_bytes`` an element of q, k and of v, o; scale and precision;
    gathers: as in ``Chip``.
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
    gathers: bool

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
    def key_block(self) -> tuple[int, int]:
        """Shape of a block of q or k."""
        return self.C, self.P * self.K

    @property
    def value_block(self) -> tuple[int, int]:
        """Shape of a block of v or o."""
        return self.C, self.heads * self.V

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a block of states, and of the scratch that carries one from chunk to chunk."""
        return self.heads, self.K, self.V

    @property
    def dtypes(self) -> tuple[str, str]:
        """The widest dtypes of q and k, and of v and o."""
        names = {2: "bfloat16", 4: "float32"}
        return names[self.q_bytes], names[self.v_bytes]

    @property
    def blocks_in_vmem(self) -> list[Buffer]:
        """Blocks of operands and results."""
        keys, values = self.dtypes
        return [
            Buffer("q, k", self.key_block, keys, 2),
            Buffer("v, o", self.value_block, values, 2),
            *(Buffer("gate", (self.C, self.heads * n), "float32") for n in self.widths.given),
            Buffer("states before and after", self.state, "float32", 2),
        ]

    @property
    def values_in_vmem(self) -> list[Buffer]:
        """Scratch, and values that registers do not hold, as programs that were compiled had them."""
        tokens = self.heads, self.C
        return [
            Buffer("scratch: the state", self.state, "float32"),
            Buffer("pairs of tokens", (*tokens, self.C), "float32", 8),
            Buffer("keys", (*tokens, self.K), "float32", 3 if self.widths.decay == 1 else 12),
            Buffer("values", (*tokens, self.V), "float32", 6),
            Buffer("states", self.state, "float32", 2),
        ]

    @property
    def vmem(self) -> int:
        """Estimated bytes of VMEM a grid step: blocks twice, since they are fetched ahead, scratch, and values."""
        return 2 * bytes_of(self.blocks_in_vmem) + bytes_of(self.values_in_vmem)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of chunks."""
        return 20 * self.chunks


class _Backward(Plan):
    """The plan of the backward kernel, whose chunks are those that states were kept of."""

    @property
    def blocks_in_vmem(self) -> list[Buffer]:
        """Blocks of operands and results."""
        found = [
            Buffer("q, k", self.key_block, self.dtypes[0], 2),
            Buffer("dq, dk", self.key_block, "float32", 2),
            Buffer("v, dO, dv", self.value_block, "float32", 3),
            *(Buffer("gate and its cotangent", (self.C, self.heads * n), "float32", 2) for n in self.widths.given),
            Buffer("state, and cotangents of states before and after", self.state, "float32", 3),
        ]
        if self.widths != ONE_GATE:
            found.append(Buffer("M, u, Aqk", (self.heads, 2, self.C, self.C), "bfloat16", 3))
        return found

    @property
    def values_in_vmem(self) -> list[Buffer]:
        """Scratch, and values that registers do not hold, as programs that were compiled had them."""
        tokens = self.heads, self.C
        factors = 0 if self.widths == ONE_GATE else 2 * self.C.bit_length() + 6  # P and Q of every level, and six more
        return [
            Buffer("scratch: the state's cotangent", self.state, "float32"),
            Buffer("pairs of tokens", (*tokens, self.C), "float32", 14),
            Buffer("keys", (*tokens, self.K), "float32", 6 + factors),
            Buffer("values", (*tokens, self.V), "float32", 8),
            Buffer("states", self.state, "float32", 3),
        ]


def plan(s: Signature, chip: Chip, kind: type[Plan] = Plan, gates: Widths | None = None) -> Plan:
    """The plan of a call: the longest chunks that fit, unless the call names their length, and then the most heads.

    Whoever runs it checks ``vmem`` and ``table_bytes`` first: where nothing fits, this is the smallest there is.
    """
    size = min(s.chunk_size or CHUNK, max(SHORTEST, 1 << (s.T - 1).bit_length()))
    while True:
        choices = [kind(*_plan(s, chip, size, P, gates or widths(s))) for P in range(1, s.H + 1) if _legal(s, P)]
        fits = [p for p in choices if p.vmem <= chip.vmem_limit]
        if fits:
            few = [p for p in fits if p.heads <= HEADS]
            return few[-1] if few else fits[0]
        if s.chunk_size is not None or size == SHORTEST:
            return choices[0]
        size //= 2


def backward_plan(s: Signature, chip: Chip) -> Plan | None:
    """The plan of a call for the backward kernel, or None where none fits; decays by channel unless all gates are one a
    head."""
    gates = widths(s)
    p = plan(s, chip, _Backward, gates if gates == ONE_GATE else gates._replace(decay=s.K))
    return p if p.vmem <= chip.vmem_limit and p.table_bytes <= TABLE_LIMIT else None


def _legal(s: Signature, P: int) -> bool:
    """Whether P key heads may share a block: whole registers of lanes, or the whole array."""
    widths = (P * s.K, P * (s.HV // s.H) * s.V)
    return s.H % P == 0 and (s.H == P or all(width % LANES == 0 for width in widths))


def _plan(s: Signature, chip: Chip, size: int, P: int, gates: Widths) -> Plan:
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
        widths=gates,
        gathers=chip.gathers,
    )
