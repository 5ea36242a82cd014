"""The TPU backend ``portable_gdn.tpu``: tile-grouped Pallas kernels, and the compiler's schedule of them for a chip.

from portable_gdn.tpu import schedule
print(schedule(function, *shapes, chip="v6e"))  # compiled by the TPU's own compiler, on this CPU
"""

from __future__ import annotations

from typing import Any

__all__ = ["schedule", "schedules"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .scheduling import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
