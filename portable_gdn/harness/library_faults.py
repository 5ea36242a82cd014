"""Known errors, in cases of the proof, of libraries that a backend only calls.

Such a result is reported with a sentence from here, and does not count against the backend.
"""

from __future__ import annotations

from importlib import metadata

__all__ = ["library_fault"]

_INVERSE = (
    "flash-linear-attention {} rounds the finished inverse to the inputs' 16 bits: where one key is repeated all its "
    "rows take the same rounding, which adds up in the gradient of the initial state: error {}"
)

_UNDERFLOW = (
    "flash-linear-attention {} multiplies q and k by exp(G) in float16, which has nothing between 0 and 6e-8: what a "
    "decay of exp(-20) leaves of them is 0, and their part of the initial state's gradient is gone: error {}"
)

#: The known errors by (FLA's version, case of the proof), which its kernels also show when they are interpreted. The
#: specification's stages show equal errors (0.20, 0.0044 and 0.020) if only the finished inverse is rounded to nearest;
#: the budget's random roundings do not add up like that. The exact gradient of plan 47 without the terms of q and k has
#: the very same error (0.20391).
_OF_FLA = {
    ("0.6.0", "one key, beta 1.998, bfloat16"): (_INVERSE.format("0.6.0", "0.18")),
    ("0.6.0", "plan 25: DeltaNet bfloat16 rows T=64 2/6 48x96, one -100, repeated, beta 1"): (
        _INVERSE.format("0.6.0", "0.0044")
    ),
    ("0.6.0", "plan 16: DeltaNet float16 rows T=65 2/6 24x16, one -1e6, repeated, beta 1.998"): (
        _INVERSE.format("0.6.0", "0.018")
    ),
    ("0.6.0", "plan 47: tile-grouped float16 packed T=1 4/4 100x128, -20 each, repeated, beta 1.998"): (
        _UNDERFLOW.format("0.6.0", "0.20")
    ),
}


def library_fault(backend: str, case: str) -> str:
    """Return the known error of the installed version of the library in this case of the proof, or ""."""
    if not backend.startswith("fla"):
        return ""
    for name in ("flash-linear-attention", "fla-core"):  # the whole package, or only its kernels
        try:
            return _OF_FLA.get((metadata.version(name), case), "")
        except metadata.PackageNotFoundError:
            continue
    return ""
