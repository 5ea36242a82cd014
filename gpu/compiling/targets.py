"""The GPUs that kernels can be compiled for, and the limits beyond which they cannot be launched there.

Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", the most that one block
may opt in to; AMD CDNA 3 instruction set architecture, section 2.4, the local data share of one compute unit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...spec.errors import bad

__all__ = ["TARGETS", "Target", "target_named"]


class Target(NamedTuple):
    """One architecture.

    backend, arch, warp: what Triton calls it, and threads in a warp. shared: bytes of shared memory that a block may
    have. capability, device: what torch says on such a machine; FLA asks it. processors: of that device.
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
        """Triton's own description."""
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
    """The target of this name.

    Raises:
        GdnError: there is none.
    """
    if name not in TARGETS:
        raise bad("arch", repr(name), f"be one of {', '.join(TARGETS)}")
    return TARGETS[name]
