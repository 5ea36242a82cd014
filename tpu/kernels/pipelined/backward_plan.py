"""The plan of the backward kernel that belongs to the pipeline. It does not import jax."""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import NormKind, Signature
from ...chips import Chip
from ..common.buffers import Buffer, bytes_of
from ..common.gate_widths import ONE_GATE, widths
from ..common.tiles import CHUNK
from ..plain.plan import backward_plan
from ..prologue.plan import describe_prologue
from .geometry import Pipeline
from .plan import pipeline

__all__ = ["Reverse", "describe_gradients", "reverse_plan"]

#: Value heads that share a grid step, at most, and chunks in it.
HEADS, UNITS = 8, 2


class Reverse(NamedTuple):
    """The static numbers of the backward kernel that belongs to the pipeline.

    B rows, T tokens; P key heads and R value heads a key head in a grid step, U chunks in it; groups of heads; parts
    that cores share; summands of what products keep; scale; bytes of an element of dq, dk and dv, at most; norm of the
    output, whose cotangents begin the kernel, or None.
    """

    B: int
    T: int
    P: int
    R: int
    U: int
    groups: int
    parts: int
    summands: int
    scale: float
    bytes: int
    norm: NormKind | None = None

    @property
    def heads(self) -> int:
        """Value heads a grid step."""
        return self.P * self.R

    @property
    def steps(self) -> int:
        """Grid steps of a row and a group of heads."""
        return -(-self.T // (self.U * CHUNK))

    @property
    def entries(self) -> int:
        """Grid steps of a part."""
        return self.B * self.groups // self.parts * self.steps

    @property
    def tail(self) -> bool:
        """Whether the last chunk reaches beyond T."""
        return self.T % (self.U * CHUNK) != 0

    @property
    def square(self) -> tuple[int, ...]:
        """Shape of a [C, C] of every value head, as which a state's cotangent is carried from chunk to chunk."""
        return self.heads, CHUNK, CHUNK

    @property
    def blocks_in_vmem(self) -> list[Buffer]:
        """Blocks of operands and results; rows of gates are a few sublanes, and left out."""
        keys, values = (self.U * CHUNK, self.P * CHUNK), (self.U * CHUNK, self.heads * CHUNK)
        made = {2: "bfloat16", 4: "float32"}[self.bytes]
        return [
            Buffer("q, k", keys, "bfloat16", 2),
            Buffer("dq, dk", keys, made, 2),
            Buffer("dO", values, "bfloat16"),
            *([] if self.norm is None else [Buffer("o, z, dz", values, "float32", 3)]),
            Buffer("dv", values, made),
            Buffer("S", (self.U, *self.square), "float32"),
            Buffer("M, u", (self.U, self.summands, *self.square), "bfloat16", 2),
            Buffer("dS_last, dS_first", self.square, "float32", 2),
        ]

    @property
    def values_in_vmem(self) -> list[Buffer]:
        """Scratch, and what the compiler spills, as programs that were compiled had it."""
        return [
            Buffer("scratch: dSt", self.square, "float32"),
            Buffer("spilled values", (self.U, *self.square), "float32", 16),
            Buffer("spilled operands of products", (self.U, self.summands, *self.square), "bfloat16", 16),
        ]

    @property
    def vmem(self) -> int:
        """Bytes of VMEM: blocks twice, since they are fetched ahead, scratch, and what the compiler spills."""
        return 2 * bytes_of(self.blocks_in_vmem) + bytes_of(self.values_in_vmem)


def reverse_plan(s: Signature, chip: Chip) -> tuple[Pipeline, Reverse] | None:
    """The plans of a call's forward pass, which keeps what the backward pass needs, and of that; None if one cannot."""
    if widths(s) != ONE_GATE or s.packed or (s.K, s.V) != (CHUNK, CHUNK) or s.precision == "highest":
        return None
    line = pipeline(s, chip, ("S", "M", "u"))
    R = s.HV // s.H
    P = max((P for P in range(1, s.H + 1) if s.H % P == 0 and P * R <= HEADS), default=None)
    if line is None or P is None:
        return None
    groups = s.H // P
    p = Reverse(
        B=s.B,
        T=s.T,
        P=P,
        R=R,
        U=UNITS,
        groups=groups,
        parts=chip.cores if s.B * groups % chip.cores == 0 else 1,
        summands=line.summands,
        scale=s.scale,
        bytes=2 if s.dtype == "bfloat16" and s.conv is None and not s.qk_l2norm else 4,
        norm=line.norm,
    )
    return (line, p) if p.vmem <= chip.vmem_bytes else None


def describe_gradients(s: Signature, chip: Chip) -> str:
    """Which kernels compute a call's gradients, in a few words."""
    pair, p = reverse_plan(s, chip), backward_plan(s, chip)
    if pair is not None:
        rule = f"kernel for long rows, {pair[1].heads} value heads and {pair[1].U} chunks a grid step"
    elif p is None:
        return "xla, since a step of one key head does not fit into the backward kernel's memory"
    else:
        rule = f"plain backward kernel, {p.heads} value heads and a chunk of {p.C} tokens a grid step"
    return ", ".join(filter(None, (rule, describe_prologue(s, chip))))
