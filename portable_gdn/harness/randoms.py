"""Reproducible random inputs, counter-based: a seed and a name give equal numbers on every machine and version.

The module uses only additions, multiplications, divisions and square roots, whose bits IEEE 754 defines. The logarithm
and the cosine of a mathematical library can differ between processors in the last bit.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

__all__ = ["log", "normal", "uniform"]

_LN2_HIGH = 0x162E42FEE * 2.0**-33  # the first 33 bits of ln 2, whose product with an exponent is exact
_LN2_LOW = 1.90821492927058770002e-10  # the rest


def _words(seed: int, name: str, count: int) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], np.uint64)
    return np.random.Philox(key=key).random_raw(count)  # the raw stream is fixed by Philox itself


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return uniform float64 numbers in (0, 1), made of 53 bits each."""
    words = _words(seed, name, math.prod(shape)) >> np.uint64(11)
    return ((words.astype(np.float64) + 0.5) * 2.0**-53).reshape(shape)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float64 numbers with a standard normal distribution, by Box and Muller's formula."""
    count = math.prod(shape)
    u = uniform(seed, name, (2, count))
    return (np.sqrt(-2 * log(u[0])) * _cosine_of_turns(u[1])).reshape(shape)


def log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of positive numbers: that of the power of 2, plus 2 atanh s for the rest."""
    m, exponent = np.frexp(x)
    low = m < math.sqrt(0.5)
    m, exponent = np.where(low, 2 * m, m), np.where(low, exponent - 1, exponent)
    s = (m - 1) / (m + 1)  # log m = 2 atanh s; |s| <= 0.172, so the term of s^23 is below the last bit
    square, total = s * s, np.zeros_like(s)
    for n in range(23, 0, -2):
        total = total * square + 1 / n
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2 * s * total)


def _cosine_of_turns(u: np.ndarray) -> np.ndarray:
    """Return cos(2 pi u) for u in [0, 1], by Taylor's series at the nearest multiple of a quarter turn."""
    quarter = np.rint(4 * u)
    x = (u - quarter / 4) * (2 * math.pi)  # |x| <= pi/4; the difference is exact
    square = x * x
    cosine, sine = np.zeros_like(x), np.zeros_like(x)
    for n in range(10, -1, -1):
        cosine = cosine * square + (-1) ** n / math.factorial(2 * n)
        sine = sine * square + (-1) ** n / math.factorial(2 * n + 1)
    turned = np.where(quarter % 2 == 0, cosine, -x * sine)
    return np.where((quarter == 2) | (quarter == 3), -turned, turned)
