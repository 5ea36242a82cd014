"""One call, normalised: what the operands are (``Signature``), the operands themselves (``Problem``), what comes back
(``Result``), and what a backend must offer (``Backend``).

A Signature holds no arrays: it is hashable, so that it can be the static argument of a compiled function and the key
of a cache. ``rules.py`` makes one of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .precision import Rounding
from .variants import Variant

__all__ = [
    "Backend",
    "ConvKind",
    "GateKind",
    "Meta",
    "Options",
    "Problem",
    "Result",
    "Signature",
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


@dataclass(frozen=True, eq=False)
class Signature:
    """A call without its arrays.

    Dimensions: B rows, T tokens, N states, H key heads, HV value heads, K key and V value channels, ``groups`` decays
    a value head (0: no decay). ``library`` is "numpy", "torch" or "jax"; ``device`` the platform ("cpu", "cuda", ...),
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


@runtime_checkable
class Backend(Protocol):
    """What the dispatcher, the door and the harness ask of an implementation.

    A backend is registered by an entry point of the group ``portable_gdn.backends`` that names an instance. It may have
    more, which only the harness reads: ``own_process`` (True: its cases run in a child process); ``quick_cases`` (names
    of the cases that the quick proof runs on it); ``remark`` (shown beside its gradients); ``known`` (a function of a
    case's name: what a library that it only calls is known to get wrong there, or None; shown, and not judged);
    ``probe`` (a function of a Problem: its stages, as ``spec.probe`` has them; in the dtype in which it stores them, if
    that is not float32); ``derived_stages`` (names of those that it never forms);
    ``emulating`` (a function: the backend that rounds operands of products as a TPU does, on any device);
    ``serves`` (a function of a Signature: what of a library serves such a call, shown by ``explain``);
    ``not_here`` (a function: why nothing that lies on this machine can be computed by it, where that is more than
    ``unavailable`` says);
    ``run_with_states`` (a function of a Problem and a number of tokens: the result, and the states behind every so
    many, where it can do better than piece by piece).
    And two that the dispatcher reads: ``elsewhere``, (platform, backend): under a trace the
    compiler takes the first for that platform and the second backend for every other; and with it ``alone``, the
    instance without that choice, which runs where the backend is asked for by name.
    """

    name: str
    libraries: tuple[str, ...]
    """Whose arrays it takes: "numpy", "torch", "jax"."""
    auto: bool
    """Whether a call that names no backend may choose it."""
    priority: int
    """Lower is tried first."""
    slow: bool
    """Whether each new shape costs it seconds; the quick proof then runs the essential cases only."""

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all (a missing package or device), as a sentence, or None."""

    def refuses(self, signature: Signature) -> str | None:
        """Why it cannot compute this call, as a sentence, or None. Must not read operands."""

    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by the library whose arrays came in, where that has automatic derivatives."""

    def gradients(self, problem: Problem, cotangents: Mapping[str, Array]) -> tuple[Result, dict[str, Array]]:
        """The result, and the cotangent of every float operand from those of "o" and "state"."""

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Array]:
        """Operands given as numpy arrays (bfloat16 by ml_dtypes) in this backend's own library, same dtypes."""

    def to_numpy(self, array: Array) -> Any:
        """The contents of one of its arrays."""

    def rounding(self, signature: Signature) -> Rounding:
        """Which operands of which products it rounds, and how, for this call."""
