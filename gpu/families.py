"""FLA's operations: the calls that each computes, and the operands that each takes. This imports no array library."""

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

CHUNK = 64  # FLA's own choice


class Family(NamedTuple):
    """One of FLA's operations.

    Attributes:
        module: the module to import it from.
        chunk: the name of its chunk form.
        recurrent: the name of its recurrent form.
        chunks: the chunk sizes that a call may ask for.
        wide: the names of operands (``spec.precision``) that it keeps in float32 if the inputs have 16 bits.
        largest_K: the largest number of key channels that its kernels take, or None.
        by_channel: whether it takes decays per channel.
        grouped: whether value heads may share key heads.
        safe: whether it has faster kernels for gates that are never below -5.
        stores: whether its backward pass reads the states between chunks rounded as they enter products.
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
        """Whether it has an erase gate, and therefore a system to solve."""
        return "A" in self.wide


def _delta(
    name: str, module: str, operation: str, chunks: tuple[int, ...], wide: tuple[str, ...], **more: bool
) -> Family:
    """Return an operation with an erase gate, which takes K up to 256."""
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
    """Return an operation that only decays."""
    module = f"fla.ops.{name}"
    return Family(name, module, f"chunk_{name}", f"fused_recurrent_{name}", chunks, wide, by_channel=by_channel)


# A are the scores that are inverted. KDA and GDN-2 also keep the gradients dA of the scores in float32. (Our chunk has
# X where FLA continues with a rounded dW and dA.)
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
    """Return the operation that computes a call."""
    if s.has("beta"):
        return FAMILIES["gdn" if s.groups <= 1 else "kda"]
    if s.has("erase") or s.has("write"):
        return FAMILIES["gdn2"]
    return FAMILIES["simple_gla" if s.groups <= 1 else "gla"]


def chunk_size(s: Signature) -> int:
    """Return the number of tokens per chunk of a call."""
    return s.chunk_size or CHUNK


def operand_dtype(s: Signature) -> str:
    """Return the dtype in which q, k and v enter FLA's kernels; results of a norm or convolution are rounded to it."""
    return "float32" if s.precision == "highest" else s.dtype


def one_token(s: Signature) -> bool:
    """Return whether a call has a single token, as FLA's recurrent kernels require."""
    return s.step or (s.T == 1 and not s.packed)


def may_reset(s: Signature) -> bool:
    """Return whether a gate of this call can be a reset.

    If none can, the call does not search for resets, which would wait for the device.
    """
    return s.has("g") and (s.gate is None or s.gate.lower_bound is None)


def norm_is_fused(s: Signature) -> bool:
    """Return whether FLA's kernels compute a call's output norm.

    They do not if torch.compile traces the call, or if z is wider than q, k and v.
    """
    return s.norm is not None and not s.deterministic


class Rule(NamedTuple):
    """The properties of a call that its kernels need in addition to the operands; constants even while tracing.

    Attributes:
        family: the name of the operation.
        scale: the factor of the queries.
        chunk: the number of tokens per chunk, or 0 for FLA's own choice.
        bounded: whether no gate is below -5.
        resets: whether a gate may be a reset.
        by_head: whether there is one decay per head.
        decays: whether there are any decays.
        raw: whether q and k must still be normalised.
        pinned, ieee: see ``launching.Settings``.
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
        """The operation of that name."""
        return FAMILIES[self.family]


def rule_of(s: Signature, raw: bool, pinned: bool, ieee: bool) -> Rule:
    """Return the properties of a call that its kernels need."""
    bounded = s.gate is not None and s.gate.lower_bound is not None
    chunk = s.chunk_size or 0
    return Rule(family(s).name, s.scale, chunk, bounded, may_reset(s), s.groups == 1, s.has("g"), raw, pinned, ieee)
