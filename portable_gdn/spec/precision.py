"""The roundings that a precision allows in matrix products, and those that a backend declares.

The three precisions limit every backend in the same way. Within these limits each backend declares the roundings that
it really makes, and is judged by them. Operands have the names that the stages give to them in their products.
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

#: A mixer's output as it is stored for the norm that follows the rule, and as it is kept for that norm's backward pass.
NORM_INPUTS = ("o", "o_kept")

#: The bits of significand that an operand keeps, including the hidden bit. "bfloat16x3" stands for three products of
#: bfloat16 halves, which together keep 16 bits of each operand.
BITS: Mapping[str, int] = MappingProxyType({"float32": 24, "bfloat16x3": 16, "tf32": 11, "float16": 11, "bfloat16": 8})


@dataclass(frozen=True)
class Rounding:
    """The roundings that a backend makes of operands before they enter a product.

    Accumulation and state are always in float32.

    Attributes:
        operands: the format (a key of ``BITS``) of each operand that is rounded; operands not named keep float32. "o"
            and "o_kept" (``NORM_INPUTS``) are not operands of products: they give the formats in which a mixer's output
            is stored for the norm that follows the rule and kept for that norm's backward pass.
        chunk_size: the number of tokens over which a chunk's sums run.
        base2: whether a chunk's finished sums of log decays are multiplied by log2(e), which rounds them once more, so
            that decays are powers of 2.
        stores: whether S and dS are stored between chunks in the format in which they enter products. The gradient of a
            decay, which combines them outside of any product, then uses the rounded values.

    Raises:
        ValueError: ``operands`` has a name or a format that does not exist.
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
        """Return the operands that each format has, as one line for a table."""
        if self.exact:
            return "float32"
        kinds: dict[str, list[str]] = {}
        for name, kept in self.operands.items():
            kinds.setdefault(kept, []).append(name)
        return "; ".join(f"{kept}: {' '.join(names)}" for kept, names in kinds.items())

    def key(self) -> tuple[Any, ...]:
        """Return a hashable key, equal for equal roundings."""
        return (tuple(sorted(self.operands.items())), self.chunk_size, self.base2, self.stores)


_INPUTS = ("q", "k", "S", "dO", "dS")
HIGHEST: Mapping[str, str] = MappingProxyType({})
DEFAULT: Mapping[str, str] = MappingProxyType(
    {name: "bfloat16" if name in _INPUTS else "bfloat16x3" for name in OPERANDS}
)
FAST: Mapping[str, str] = MappingProxyType(dict.fromkeys(OPERANDS, "bfloat16"))


def stochastic_round(x: np.ndarray, bits: int, rng: np.random.Generator) -> np.ndarray:
    """Round float64 x to ``bits`` bits of significand, up or down at random so that the expected value is x."""
    significand, exponent = np.frexp(x)
    scaled = np.ldexp(significand, bits)
    with np.errstate(invalid="ignore"):
        return np.ldexp(np.floor(scaled + rng.random(x.shape)), exponent - bits)


def stored_states(rounding: Rounding, rng: np.random.Generator) -> Any:
    """Return a function that rounds S or dS as the backend stores them; ``chunkwise.backward_chunk`` takes it."""

    def stored(x: np.ndarray, name: str) -> np.ndarray:
        kept = rounding.operands.get(name, "float32") if rounding.stores else "float32"
        return x if kept == "float32" else stochastic_round(x, BITS[kept], rng)

    return stored


def stored_outputs(rounding: Rounding, rng: np.random.Generator) -> Any:
    """Return a function that rounds a mixer's output as the backend stores it; ``evaluate.evaluate`` takes it."""

    def stored(x: np.ndarray, name: str) -> np.ndarray:
        kept = rounding.operands.get(name, "float32")
        return x if kept == "float32" else stochastic_round(x, BITS[kept], rng)

    return stored


def rounded_product(rounding: Rounding, rng: np.random.Generator) -> Any:
    """Return a product of float64 arrays that rounds its operands as declared, stochastically, and nothing else."""

    def product(a: np.ndarray, b: np.ndarray, name_a: str, name_b: str) -> np.ndarray:
        kept_a, kept_b = (rounding.operands.get(name, "float32") for name in (name_a, name_b))
        a = a if kept_a == "float32" else stochastic_round(a, BITS[kept_a], rng)
        b = b if kept_b == "float32" else stochastic_round(b, BITS[kept_b], rng)
        return a @ b

    return product
