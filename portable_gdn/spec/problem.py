"""One call, normalised: what the operands are (``Signature``), the operands themselves (``Problem``), and what comes
back (``Result``).

A Signature holds no arrays: it is hashable, so that it can be the static argument of a compiled function and the key
of a cache. ``rules.py`` makes one of a call.
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
    """What is known of an operand without reading it."""

    shape: tuple[int, ...]
    dtype: str
    device: str


class GateKind(NamedTuple):
    """How the raw projection given as g becomes a log decay: softplus, or bounded if there is a lower bound."""

    lower_bound: float | None


class ConvKind(NamedTuple):
    """The short convolution of a mixer call."""

    width: int
    activation: str | None
    fused: bool  # q | k | v came as one array
    channels: int


class NormKind(NamedTuple):
    """The output norm of a mixer call, RMS norm over a value head; activation of its gate z, or None without one."""

    eps: float
    activation: str | None


class UpdateOptions(NamedTuple):
    """What the caller of an update asked for: tokens then come ragged, [T, ...], and states lie in a pool."""

    window: int | None = None
    checkpoint_every: int | None = None


class PoolKind(NamedTuple):
    """The pool of an update, and what the update does with it.

    Attributes:
        slots: S, slot 0 among them, which holds nothing.
        room: R, the tokens that can wait in a slot until they are accepted.
        window: rows of at most so many tokens wait; 0 commits every token at once.
        state_dtype: that of the recurrent states as they are stored.
        checkpoint_every: tokens between checkpoints, or 0.
        columns: P, slots a row for checkpoints.
    """

    slots: int
    room: int
    window: int
    state_dtype: str
    checkpoint_every: int
    columns: int


class Options(NamedTuple):
    """What the caller asked for beside the operands; the defaults are those of ``gated_delta_rule``."""

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
    """A call without its arrays.

    Dimensions: B rows, T tokens, N states, H key heads, HV value heads, K key and V value channels, ``groups`` decays
    a value head (0: no decay). Of an update of a pool (``update`` says which) B is 1, T counts the ragged tokens and N
    the rows of its batch. ``library`` is "numpy", "torch" or "jax"; ``device`` the platform ("cpu", "cuda", ...),
    or "traced" where it is not known yet. ``operands`` names the arrays that are there, in order.
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
        if found is None:  # not before it is asked for: under torch.compile it would fix every dimension
            found = hash(self._key)  # type: ignore[attr-defined]
            object.__setattr__(self, "_hash", found)
        return found

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self._key == other._key)  # type: ignore[attr-defined]

    def has(self, operand: str) -> bool:
        """Whether the call brings this operand."""
        return operand in self.operands

    @property
    def packed(self) -> bool:
        """Whether sequences are packed in one row by cu_seqlens."""
        return "cu_seqlens" in self.operands

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of the recurrent state in the caller's layout."""
        inner = (self.K, self.V) if self.state_layout == "kv" else (self.V, self.K)
        return (self.N, self.HV, *inner)

    @property
    def symbolic(self) -> bool:
        """Whether a number of rows, tokens or sequences is a symbol of ``jax.export``, with no value yet."""
        return self.library == "jax" and not all(isinstance(n, int) for n in (self.B, self.T, self.N))

    @property
    def traced(self) -> bool:
        """Whether the operands are abstract values of a trace, with no device and no contents."""
        return self.device == "traced"


class Problem(NamedTuple):
    """A normalised call: its signature, and its operands by name in the caller's own layout and dtypes."""

    signature: Signature
    operands: dict[str, Array]


class Result(NamedTuple):
    """What a backend returns: o in v's dtype and the caller's layout, states float32, None where not asked for."""

    o: Array
    state: Array | None = None
    conv_state: Array | None = None


class UpdateResult(NamedTuple):
    """What a backend returns from an update: o [T, HV, V] in v's dtype, and the pool's arrays by their names among the
    operands."""

    o: Array
    pool: dict[str, Array]
