"""One call in normalised form: its description (``Signature``), operands (``Problem``) and results (``Result``).

A Signature holds no arrays. It is hashable, so that it can be a static argument of a compiled function or the key of a
cache. ``rules.py`` makes the signature of a call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from .variants import Variant

__all__ = [
    "ConvKind",
    "GateKind",
    "Meta",
    "NormKind",
    "Options",
    "PoolKind",
    "Problem",
    "Result",
    "Signature",
    "UpdateOptions",
    "UpdateResult",
]

Array = Any


class Meta(NamedTuple):
    """The metadata of an operand, which can be had without reading its contents."""

    shape: tuple[int, ...]
    dtype: str
    device: str


class GateKind(NamedTuple):
    """The activation that turns the raw projection given as g into a log decay.

    Attributes:
        lower_bound: that of the bounded gate; None means the softplus gate.
    """

    lower_bound: float | None


class ConvKind(NamedTuple):
    """The short convolution of a mixer call.

    Attributes:
        width: W, the number of taps.
        activation: "silu" or None.
        fused: whether q, k and v came side by side in one array.
        channels: the number of channels of q, k and v together.
    """

    width: int
    activation: str | None
    fused: bool
    channels: int


class NormKind(NamedTuple):
    """The output norm of a mixer call: an RMS norm over the channels of each value head.

    Attributes:
        eps: added to the mean of squares.
        activation: that of the gate z, "silu" or "sigmoid"; None means that there is no gate.
    """

    eps: float
    activation: str | None


class UpdateOptions(NamedTuple):
    """The options of an update, whose tokens are ragged, [T, ...], and whose states lie in a pool.

    Attributes:
        window: rows of at most this many tokens wait until they are accepted, or None.
        checkpoint_every: the number of tokens between checkpoints, or None for no checkpoints.
    """

    window: int | None = None
    checkpoint_every: int | None = None


class PoolKind(NamedTuple):
    """The pool of an update, and the update's use of it.

    Attributes:
        slots: S, the number of slots, including slot 0, which holds nothing.
        room: R, the number of tokens that can wait in each slot until they are accepted.
        window: rows of at most this many tokens wait; 0 commits every token at once.
        state_dtype: the dtype in which the recurrent states are stored.
        checkpoint_every: the number of tokens between checkpoints, or 0 for no checkpoints.
        columns: P, the number of slots for checkpoints per row.
    """

    slots: int
    room: int
    window: int
    state_dtype: str
    checkpoint_every: int
    columns: int


class Options(NamedTuple):
    """The options of a call, apart from its operands. The defaults are those of ``gated_delta_rule``."""

    scale: float | None = None
    output_final_state: bool = False
    qk_l2norm: bool = False
    gate: GateKind | None = None
    chunk_size: int | None = None
    precision: str | None = None
    state_layout: str = "kv"
    deterministic: bool = False
    step: bool = False
    conv_activation: str | None = None
    num_heads: int | None = None  # mixer only: key heads H
    key_dim: int | None = None  # mixer with one array only: K
    norm: NormKind | None = None  # mixer only
    update: UpdateOptions | None = None


@dataclass(frozen=True, eq=False)
class Signature:
    """The description of a call, without its arrays.

    Attributes:
        library: "numpy", "torch" or "jax".
        device: the platform ("cpu", "cuda", ...), or "traced" if it is not known yet.
        operands: the names of the operands that the call has, in order.
        B: the number of rows; 1 in an update of a pool.
        T: the number of tokens per row; in an update, the number of all its ragged tokens.
        N: the number of states; in an update, the number of rows of its batch.
        H: the number of key heads.
        HV: the number of value heads.
        K: the number of key channels per head.
        V: the number of value channels per head.
        groups: the number of decays per value head; 0 means no decay.
        dtype: the dtype of q, k and v.
        variant: the member of the family, by the granularity of its gates.
        scale: the factor of the queries.
        output_final_state: whether the call returns the final states.
        qk_l2norm: whether the call normalises q and k.
        gate: the activation of the log decay, or None if g is a log decay already.
        chunk_size: the number of tokens per chunk that the caller asked for, or None.
        precision: "highest", "default" or "fast".
        state_layout: "kv" or "vk", the order of the last two axes of the states.
        deterministic: whether the results must be reproducible bit by bit.
        step: whether the call computes one token per row, without an axis of tokens.
        conv: the short convolution, or None.
        norm: the output norm, or None.
        update: the pool if the call is an update, or None.
    """

    library: str
    device: str
    operands: tuple[str, ...]
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    groups: int
    dtype: str
    variant: Variant
    scale: float
    output_final_state: bool
    qk_l2norm: bool
    gate: GateKind | None
    chunk_size: int | None
    precision: str
    state_layout: str
    deterministic: bool
    step: bool
    conv: ConvKind | None
    norm: NormKind | None = None
    update: PoolKind | None = None

    def __post_init__(self) -> None:
        key = tuple(getattr(self, f.name) for f in fields(self))
        object.__setattr__(self, "_key", key)

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:  # computed only when needed: under torch.compile, hashing fixes every dimension
            found = hash(self._key)  # type: ignore[attr-defined]
            object.__setattr__(self, "_hash", found)
        return found

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self._key == other._key)  # type: ignore[attr-defined]

    def has(self, operand: str) -> bool:
        """Return whether the call has this operand."""
        return operand in self.operands

    @property
    def packed(self) -> bool:
        """Whether the call packs its sequences into one row, with boundaries in cu_seqlens."""
        return "cu_seqlens" in self.operands

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """The shape of the recurrent states in the caller's layout: [N, HV, K, V], or [N, HV, V, K]."""
        inner = (self.K, self.V) if self.state_layout == "kv" else (self.V, self.K)
        return (self.N, self.HV, *inner)

    @property
    def symbolic(self) -> bool:
        """Whether B, T or N is a symbolic dimension of ``jax.export``, which has no value yet."""
        return self.library == "jax" and not all(isinstance(n, int) for n in (self.B, self.T, self.N))

    @property
    def traced(self) -> bool:
        """Whether the operands are abstract values of a trace, which have no device and no contents."""
        return self.device == "traced"


class Problem(NamedTuple):
    """A normalised call: its signature, and its operands by name, in the caller's layout and dtypes."""

    signature: Signature
    operands: dict[str, Array]


class Result(NamedTuple):
    """The results of a call.

    Attributes:
        o: the outputs, in v's dtype and the caller's layout.
        state: the final recurrent states in float32 and the caller's layout, or None if the call does not return them.
        conv_state: the final states of the convolution, or None if the call does not return them.
    """

    o: Array
    state: Array | None = None
    conv_state: Array | None = None


class UpdateResult(NamedTuple):
    """The results of an update.

    Attributes:
        o: the outputs [T, HV, V] in v's dtype.
        pool: the arrays of the pool, by their names in the table of operands.
    """

    o: Array
    pool: dict[str, Array]
