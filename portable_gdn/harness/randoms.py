"""Reproducible inputs: counter-based, the same numbers from the same seed and name on every machine and version.

Only additions, multiplications, divisions and square roots are used, which IEEE 754 fixes to the bit; logarithm and
cosine of a mathematical library differ in the last bit from one processor to the next.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

__all__ = ["log", "normal", "uniform"]

_LN2_HIGH = 0x162E42FEE * 2.0**-33  # the first 33 bits of ln 2: times an exponent they are exact
_LN2_LOW = 1.90821492927058770002e-10  # the rest


def _words(seed: int, name: str, count: int) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], np.uint64)
    return np.random.Philox(key=key).random_raw(count)  # the raw stream is fixed by Philox itself


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in (0, 1), from 53 bits each."""
    words = _words(seed, name, math.prod(shape)) >> np.uint64(11)
    return ((words.astype(np.float64) + 0.5) * 2.0**-53).reshape(shape)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 standard normal, by Box and Muller's formula."""
    count = math.prod(shape)
    u = uniform(seed, name, (2, count))
    return (np.sqrt(-2 * log(u[0])) * _cosine_of_turns(u[1])).reshape(shape)


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive numbers: that of the power of 2, plus 2 atanh s of the rest."""
    m, exponent = np.frexp(x)
    low = m < math.sqrt(0.5)
    m, exponent = np.where(low, 2 * m, m), np.where(low, exponent - 1, exponent)
    s = (m - 1) / (m + 1)  # log m = 2 atanh s; at most 0.172 in size: the term of s^23 is below the last bit
    square, total = s * s, np.zeros_like(s)
    for n in range(23, 0, -2):
        total = total * square + 1 / n
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2 * s * total)


def _cosine_of_turns(u: np.ndarray) -> np.ndarray:
    """cos(2 pi u) for u in [0, 1], by Taylor's series of the nearest multiple of a quarter turn."""
    quarter = np.rint(4 * u)
    x = (u - quarter / 4) * (2 * math.pi)  # at most pi/4 in size; the difference is exact
    square = x * x
    cosine, sine = np.zeros_like(x), np.zeros_like(x)
    for n in range(10, -1, -1):
        cosine = cosine * square + (-1) ** n / math.factorial(2 * n)
        sine = sine * square + (-1) ** n / math.factorial(2 * n + 1)
    turned = np.where(quarter % 2 == 0, cosine, -x * sine)
    return np.where((quarter == 2) | (quarter == 3), -turned, turned)
