"""The GPUs for which kernels can be compiled, and the limits above which these cannot be launched.

The limits of shared memory are the most that one block may opt in to (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability"), and the local data share of one compute unit (AMD CDNA 3 instruction set
architecture, section 2.4).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...spec.errors import bad

__all__ = ["TARGETS", "Target", "target_named"]


class Target(NamedTuple):
    """One architecture.

    ``backend`` and ``arch`` are Triton's names for it, and ``warp`` is the number of threads per warp. ``shared`` is
    the number of bytes of shared memory that a block may have. ``capability`` and ``device`` are what torch reports on
    such a machine, which FLA reads. ``processors`` is the number of multiprocessors of that device.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared: int
    capability: tuple[int, int]
    device: str
    processors: int

    def triton(self) -> Any:
        """Triton's own description of the architecture."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp)


TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32, 166_912, (8, 0), "NVIDIA A100-SXM4-80GB", 108),
        Target("sm_90", "cuda", 90, 32, 232_448, (9, 0), "NVIDIA H100 80GB HBM3", 132),
        Target("sm_100", "cuda", 100, 32, 232_448, (10, 0), "NVIDIA B200", 148),
        Target("gfx942", "hip", "gfx942", 64, 65_536, (9, 4), "AMD Instinct MI300X", 304),
    )
}


def target_named(name: str) -> Target:
    """Return the target of this name.

    Raises:
        GdnError: there is no target of that name.
    """
    if name not in TARGETS:
        raise bad("arch", repr(name), f"be one of {', '.join(TARGETS)}")
    return TARGETS[name]
