"""A copy between arrays of the same shape that is also fast if one of them is a transposed view."""

from __future__ import annotations

import numpy as np

__all__ = ["copy"]

_ROWS, _COLUMNS = 512, 16  # the size of a tile; the fastest of several that were measured


def copy(to: np.ndarray, source: np.ndarray) -> None:
    """Do ``to[...] = source``, in tiles if that is faster; the dtypes may differ.

    Where the contiguous axes of the two arrays differ, a copy of the whole array misses the cache at every element, and
    a copy in tiles does not.
    """
    if to.dtype == source.dtype and to.itemsize in (1, 2, 4, 8):
        # numpy moves integers faster than elements of dtypes that other packages define.
        to, source = to.view(f"u{to.itemsize}"), source.view(f"u{source.itemsize}")
    if to.ndim < 2 or source.size < _ROWS * _COLUMNS or source.strides[-1] == source.itemsize:
        to[...] = source
        return
    fast = min(range(source.ndim), key=lambda n: source.strides[n] if source.shape[n] > 1 else 2**62)
    last = to.ndim - 1
    if fast == last:
        to[...] = source
        return
    head: list[slice] = [slice(None)] * to.ndim
    for i in range(0, to.shape[fast], _ROWS):
        head[fast] = slice(i, i + _ROWS)
        for j in range(0, to.shape[last], _COLUMNS):
            head[last] = slice(j, j + _COLUMNS)
            at = tuple(head)
            to[at] = source[at]
