"""The GPU backend (``portable_gdn.gpu``): flash-linear-attention's Triton kernels, and reports of compiled kernels.

from portable_gdn.gpu import compile_report
print(compile_report(kernel, {"x": "*bf16"}, sizes={"n": 4096}, arch="sm_90"))  # compiled here, without a GPU
"""

from __future__ import annotations

from typing import Any

__all__ = ["TARGETS", "compile_report", "serving"]


def __getattr__(name: str) -> Any:
    if name == "compile_report":
        from .compiling.kernel import compile_report

        return compile_report
    if name == "TARGETS":
        from .compiling.targets import TARGETS

        return TARGETS
    if name == "serving":
        from .launching import serving

        return serving
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
