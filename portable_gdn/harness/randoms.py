"""Reproducible inputs: counter-based, the same numbers from the same seed and name on every machine and version."""

from __future__ import annotations

import hashlib
import math

import numpy as np

__all__ = ["normal", "uniform"]


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
    return (np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])).reshape(shape)
