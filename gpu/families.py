"""Which of FLA's operations computes which calls, and what each takes. No array library is imported here."""

from __future__ import annotations

from typing import NamedTuple

from ..spec.problem import Signature

__all__ = [
    "CHUNK",
    "FAMILIES",
    "Family",
    "Rule",
    "chunk_size",
    "family",
    "may_reset",
    "norm_is_fused",
    "one_token",
    "operand_dtype",
    "rule_of",
]

CHUNK = 64  # FLA's own


class Family(NamedTuple):
    """One of FLA's operations.

    module, chunk, recurrent: where it is imported from, and the names of both forms.
    chunks: chunk sizes that a call may ask for. largest_K: the widest keys that its kernels take, or None.
    by_channel: whether it takes decays by channel. grouped: whether value heads may share key heads.
    wide: names of operands (``spec.precision``) that it keeps in float32 where the inputs have 16 bits.
    safe: whether it has faster kernels for gates that are never below -5.
    stores: whether its backward pass reads states between chunks as rounded as products take them.
    """

    name: str
    module: str
    chunk: str
    recurrent: str
    chunks: tuple[int, ...]
    wide: tuple[str, ...] = ()
    largest_K: int | None = None
    by_channel: bool = False
    grouped: bool = False
    safe: bool = False
    stores: bool = False

    @property
    def erases(self) -> bool:
        """Whether it has an erase gate, and so a system to solve."""
        return "A" in self.wide


def _delta(
    name: str, module: str, operation: str, chunks: tuple[int, ...], wide: tuple[str, ...], **more: bool
) -> Family:
    """One that erases: K at most 256."""
    return Family(
        name,
        f"fla.ops.{module}",
        f"chunk_{operation}",
        f"fused_recurrent_{operation}",
        chunks,
        wide,
        256,
        stores=True,
        **more,
    )


def _gla(name: str, chunks: tuple[int, ...], wide: tuple[str, ...] = (), by_channel: bool = False) -> Family:
    """One that only decays."""
    module = f"fla.ops.{name}"
    return Family(name, module, f"chunk_{name}", f"fused_recurrent_{name}", chunks, wide, by_channel=by_channel)


# A: the scores that are inverted. KDA's and GDN-2's score gradients dA stay float32 too. (Our chunk has X where FLA
# multiplies on with a rounded dW and dA.)
FAMILIES = {
    f.name: f
    for f in (
        _delta("gdn", "gated_delta_rule", "gated_delta_rule", (16, 32, 64), ("A",), grouped=True),
        _delta("kda", "kda", "kda", (32, 64), ("A", "dA"), grouped=True, by_channel=True, safe=True),
        _delta("gdn2", "gdn2", "gdn2", (64,), ("A", "dA"), by_channel=True, safe=True),
        _gla("gla", (64,), ("dA",), by_channel=True),
        _gla("simple_gla", (16, 32, 64)),
    )
}


def family(s: Signature) -> Family:
    """The operation that computes a call."""
    if s.has("beta"):
        return FAMILIES["gdn" if s.groups <= 1 else "kda"]
    if s.has("erase") or s.has("write"):
        return FAMILIES["gdn2"]
    return FAMILIES["simple_gla" if s.groups <= 1 else "gla"]


def chunk_size(s: Signature) -> int:
    """Tokens in a chunk of a call."""
    return s.chunk_size or CHUNK


def operand_dtype(s: Signature) -> str:
    """The dtype in which q, k and v enter FLA's kernels; what comes out of a norm or convolution is rounded to it."""
    return "float32" if s.precision == "highest" else s.dtype


def one_token(s: Signature) -> bool:
    """Whether a call has a single token, which FLA's recurrent kernels are for."""
    return s.step or (s.T == 1 and not s.packed)


def may_reset(s: Signature) -> bool:
    """Whether a gate of this call can be a reset; where none can, none is looked for (it would wait for the device)."""
    return s.has("g") and (s.gate is None or s.gate.lower_bound is None)


def norm_is_fused(s: Signature) -> bool:
    """Whether FLA's kernels compute a call's output norm, unless torch.compile traces it or z is wider than q, k, v."""
    return s.norm is not None and not s.deterministic


class Rule(NamedTuple):
    """What of a call its kernels must know beside the operands: constants, whatever is traced.

    family: name of the operation. chunk: tokens, 0 for FLA's own choice. bounded: no gate is below -5. resets: a gate
    may be one. by_head: one decay a head. decays: there are any. raw: q and k are still to be normalised. pinned, ieee:
    see ``launching.Settings``.
    """

    family: str
    scale: float
    chunk: int
    bounded: bool
    resets: bool
    by_head: bool
    decays: bool
    raw: bool
    pinned: bool
    ieee: bool

    @property
    def kind(self) -> Family:
        """The operation."""
        return FAMILIES[self.family]


def rule_of(s: Signature, raw: bool, pinned: bool, ieee: bool) -> Rule:
    """The rule of a call."""
    bounded = s.gate is not None and s.gate.lower_bound is not None
    chunk = s.chunk_size or 0
    return Rule(family(s).name, s.scale, chunk, bounded, may_reset(s), s.groups == 1, s.has("g"), raw, pinned, ieee)
