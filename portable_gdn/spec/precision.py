"""What matrix products may round, and what a backend declares that it does round.

The three precisions bound every backend alike; within them each declares what it really does, and is judged by that.
Operand names are those that the stages give to their products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

__all__ = [
    "BITS",
    "DEFAULT",
    "FAST",
    "HIGHEST",
    "NORM_INPUTS",
    "OPERANDS",
    "PRECISIONS",
    "Rounding",
    "rounded_product",
    "stored_outputs",
    "stored_states",
]

PRECISIONS = ("highest", "default", "fast")

#: Names of operands of products: inputs and state, then what is computed within a chunk, then cotangents.
OPERANDS = ("q", "k", "S", "A", "T", "R", "W", "Aqk", "Vn", "dO", "dS", "dVn", "X", "dA")

#: What memory may round of a mixer's output on its way to the norm behind the rule, and to that norm's backward pass.
NORM_INPUTS = ("o", "o_kept")

#: Bits of significand that an operand keeps (the hidden one included). "bfloat16x3" stands for three passes of
#: products of bfloat16 halves, which keep 16 bits of each operand.
BITS: Mapping[str, int] = MappingProxyType({"float32": 24, "bfloat16x3": 16, "tf32": 11, "float16": 11, "bfloat16": 8})


@dataclass(frozen=True)
class Rounding:
    """Which operands are rounded before they enter a product, by name; those not named keep float32.

    Accumulation and state are float32 always. ``chunk_size`` is the chunk in which the sums run. ``base2``: a chunk's
    finished sums of decays are multiplied by log2(e), which rounds them once more, and decays are powers of 2.
    ``stores``: S and dS are kept between chunks as rounded as they enter products, so that a decay's gradient, in which
    they meet outside of any product, sees them so. "o" and "o_kept" (``NORM_INPUTS``) are no operands of products: they
    say what memory leaves of a mixer's output for the norm behind the rule, forward and backward.
    """

    operands: Mapping[str, str] = field(default_factory=dict)
    chunk_size: int = 64
    base2: bool = False
    stores: bool = False

    def __post_init__(self) -> None:
        for name, kept in self.operands.items():
            known = (*OPERANDS, *NORM_INPUTS)
            if name not in known or kept not in BITS:
                raise ValueError(f"Rounding names {name!r}: {kept!r}; operands are {known}, formats {tuple(BITS)}.")

    @property
    def exact(self) -> bool:
        """Whether every operand keeps float32."""
        return all(kept == "float32" for kept in self.operands.values())

    def describe(self) -> str:
        """One line for a table."""
        if self.exact:
            return "float32"
        kinds: dict[str, list[str]] = {}
        for name, kept in self.operands.items():
            kinds.setdefault(kept, []).append(name)
        return "; ".join(f"{kept}: {' '.join(names)}" for kept, names in kinds.items())

    def key(self) -> tuple[Any, ...]:
        """A hashable form."""
        return (tuple(sorted(self.operands.items())), self.chunk_size, self.base2, self.stores)


_INPUTS = ("q", "k", "S", "dO", "dS")
HIGHEST: Mapping[str, str] = MappingProxyType({})
DEFAULT: Mapping[str, str] = MappingProxyType(
    {name: "bfloat16" if name in _INPUTS else "bfloat16x3" for name in OPERANDS}
)
FAST: Mapping[str, str] = MappingProxyType(dict.fromkeys(OPERANDS, "bfloat16"))


def stochastic_round(x: np.ndarray, bits: int, rng: np.random.Generator) -> np.ndarray:
    """Round float64 x to ``bits`` bits of significand, up or down with the odds that make the mean exact."""
    significand, exponent = np.frexp(x)
    scaled = np.ldexp(significand, bits)
    with np.errstate(invalid="ignore"):
        return np.ldexp(np.floor(scaled + rng.random(x.shape)), exponent - bits)


def stored_states(rounding: Rounding, rng: np.random.Generator) -> Any:
    """What is left of S or dS in memory, as declared; see ``chunkwise.backward_chunk``."""

    def stored(x: np.ndarray, name: str) -> np.ndarray:
        kept = rounding.operands.get(name, "float32") if rounding.stores else "float32"
        return x if kept == "float32" else stochastic_round(x, BITS[kept], rng)

    return stored


def stored_outputs(rounding: Rounding, rng: np.random.Generator) -> Any:
    """What is left in memory of a mixer's output for its norm, as declared; see ``evaluate.evaluate``."""

    def stored(x: np.ndarray, name: str) -> np.ndarray:
        kept = rounding.operands.get(name, "float32")
        return x if kept == "float32" else stochastic_round(x, BITS[kept], rng)

    return stored


def rounded_product(rounding: Rounding, rng: np.random.Generator) -> Any:
    """A product on float64 arrays that rounds its operands as declared, stochastically, and nothing else."""

    def product(a: np.ndarray, b: np.ndarray, name_a: str, name_b: str) -> np.ndarray:
        kept_a, kept_b = (rounding.operands.get(name, "float32") for name in (name_a, name_b))
        a = a if kept_a == "float32" else stochastic_round(a, BITS[kept_a], rng)
        b = b if kept_b == "float32" else stochastic_round(b, BITS[kept_b], rng)
        return a @ b

    return product
