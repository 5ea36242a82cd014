"""The plan of the kernels that compute what lies before the rule, and its cotangents, for the backward pass: how tokens
and channels are cut. It does not import jax."""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import Signature
from ...chips import Chip
from ..common.tiles import LANES
from ..pipelined.plan import prepared_outside

__all__ = ["HALO", "Part", "Prologue", "describe_prologue", "gate_block", "prologue_plans", "why_not_inside"]

#: Tokens before a block that come with it: a tile of bfloat16, and at least what the widest convolution looks back.
HALO = 16
#: The widest convolution whose reach into later tokens fits into a tile of float32.
WIDEST = 8
#: Tokens and channels of a block, at most.
TOKENS, CHANNELS = 512, 2048
#: Channels of a block of gates, at most.
GATE_CHANNELS = 1024


class Part(NamedTuple):
    """Channels side by side that are treated alike: q, k or v. ``norm``: whether heads are normalised."""

    name: str
    channels: int
    norm: bool


class Prologue(NamedTuple):
    """The static numbers of the two kernels for one array of channels.

    B rows, T tokens; parts, which make up the array; head: channels that are normalised together; taps of the
    convolution; its bias; silu behind it; skip: whether the first taps - 1 tokens of sequences, which see a given
    state, are left to the caller; R tokens and L channels a block; packed: whether sequences are packed in one row;
    vmem: bytes that the compiler may use.
    """

    B: int
    T: int
    parts: tuple[Part, ...]
    head: int
    taps: int
    bias: bool
    silu: bool
    skip: bool
    R: int
    L: int
    packed: bool
    vmem: int

    @property
    def masks(self) -> bool:
        """Whether there may be blocks with tokens that are not alike: at borders of sequences, and beyond a row."""
        return self.packed or self.skip or self.T % self.R != 0

    @property
    def head_tiles(self) -> int:
        """Tiles of lanes of what is normalised together, or one that several heads share."""
        return max(self.head // LANES, 1)

    @property
    def sums(self) -> int:
        """Sums over tokens of each channel: for each tap, and for the bias."""
        return self.taps + self.bias

    @property
    def channels(self) -> int:
        """How many channels the array has."""
        return sum(part.channels for part in self.parts)

    @property
    def blocks(self) -> int:
        """Blocks of tokens in a row; the last one may reach beyond T."""
        return -(-self.T // self.R)

    @property
    def columns(self) -> int:
        """Blocks of channels."""
        return self.channels // self.L

    def first(self, i: int) -> int:
        """The first block of channels of a part."""
        return sum(part.channels for part in self.parts[:i]) // self.L


def why_not_inside(s: Signature) -> str | None:
    """Why XLA derives the cotangents of a mixer's convolution and norm from the specification, or None."""
    if s.conv is None:
        return "there is no convolution"
    if prepared_outside(s):
        return "a mask or segments let tokens look across gaps"
    if s.conv.width > WIDEST:
        return f"the convolution is {s.conv.width} wide, and the kernel takes up to {WIDEST}"
    if s.qk_l2norm and s.K % LANES and LANES % s.K:
        return f"heads of {s.K} channels do not share tiles of {LANES} lanes evenly"
    if not _widths(_parts(s), _turn(s)):
        return f"{s.H * s.K} and {s.HV * s.V} channels of keys and values are no whole tiles of {_turn(s)} lanes"
    return None


def _turn(s: Signature) -> int:
    """Lanes of whole tiles that whole heads fill, where they are normalised."""
    return max(s.K, LANES) if s.qk_l2norm else LANES


def _parts(s: Signature) -> tuple[Part, ...]:
    keys, values = s.H * s.K, s.HV * s.V
    return Part("q", keys, s.qk_l2norm), Part("k", keys, s.qk_l2norm), Part("v", values, False)


def _widths(parts: tuple[Part, ...], turn: int) -> list[int]:
    """Channels that a block may have."""
    least = min(part.channels for part in parts)
    return [n for n in range(turn, least + 1, turn) if all(part.channels % n == 0 for part in parts)]


def prologue_plans(s: Signature, chip: Chip) -> tuple[Prologue, ...] | None:
    """The plans of a call, one for each array of channels (qkv, or q, k and v), or None where XLA does it."""
    if why_not_inside(s) is not None:
        return None
    assert s.conv is not None
    parts = _parts(s)
    arrays = (parts,) if s.conv.fused else tuple((part,) for part in parts)
    return tuple(_plan(s, chip, of) for of in arrays)


def _plan(s: Signature, chip: Chip, parts: tuple[Part, ...]) -> Prologue:
    assert s.conv is not None
    widths = [n for n in _widths(parts, _turn(s)) if n <= CHANNELS] or [_turn(s)]
    rows, element = min(TOKENS, -(-s.T // HALO) * HALO), 2 if s.dtype == "bfloat16" else 4
    # Blocks twice, since they are fetched ahead: x and its cotangent, and those of each part's output.
    memory = lambda L: 2 * rows * L * (2 * element + 4 * len(parts)) + (6 << 20)  # noqa: E731
    L = max((n for n in widths if memory(n) <= chip.vmem_bytes // 2), default=widths[0])
    return Prologue(
        B=s.B,
        T=s.T,
        parts=parts,
        head=s.K if s.qk_l2norm else LANES,
        taps=s.conv.width,
        bias=s.has("conv_bias"),
        silu=s.conv.activation == "silu",
        skip=s.has("conv_state"),
        R=rows,
        L=L,
        packed=s.packed,
        vmem=memory(L),
    )


def gate_block(s: Signature, chip: Chip) -> tuple[int, int] | None:
    """Tokens and channels of a block of decays by channel that a call gives raw, or None where XLA activates them."""
    channels = s.HV * s.K
    if s.gate is None or s.groups != s.K or channels % LANES or why_not_inside(s) is not None:
        return None
    most = GATE_CHANNELS if chip.vmem_bytes > 32 << 20 else LANES
    L = max(n for n in range(LANES, min(most, channels) + 1, LANES) if channels % n == 0)
    return min(TOKENS, -(-s.T // HALO) * HALO), L


def describe_prologue(s: Signature, chip: Chip) -> str:
    """Who computes the cotangents of what lies before the rule, in a few words; "" where nothing does."""
    if s.conv is None and not s.qk_l2norm and s.gate is None:
        return ""
    plans, why = prologue_plans(s, chip), why_not_inside(s)
    if plans is None:
        return f"those of convolution, norm and gates by xla, since {why}"
    p = plans[0]
    return f"those of convolution and norm in a kernel of their own, {p.R} tokens and {p.L} channels a grid step"
