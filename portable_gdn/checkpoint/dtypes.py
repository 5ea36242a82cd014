"""The dtypes of safetensors files as numpy dtypes; ml_dtypes provides those that numpy lacks."""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = ["FLOAT8", "FLOATS", "NAMES", "WIDE", "dtype_of", "itemsize"]

NAMES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
        "C64": np.complex64,
    }.items()
}

WIDE = ("F64", "F32", "F16", "BF16")
"""What a weight may be without scales."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")
FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What ``--dtype`` takes, and how a file calls it."""


def dtype_of(name: str) -> np.dtype:
    """Return the numpy dtype for a dtype name of a safetensors file, such as "BF16"."""
    return NAMES[name]


def itemsize(name: str) -> int:
    """Return the number of bytes of one element."""
    return NAMES[name].itemsize
