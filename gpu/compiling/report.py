"""Reports of the resources that compiled kernels use, as figures, text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["CompileReport", "KernelReport"]


class KernelReport(NamedTuple):
    """One kernel in one configuration.

    Attributes:
        name: the name of the kernel's function.
        config: the configuration of the launch: tile sizes, warps, stages.
        registers: the number of registers per thread; on AMD vector registers, including accumulation registers.
        stack: the bytes of local memory per thread, including spills.
        spill_stores, spill_loads: bytes per thread on NVIDIA; registers on AMD, where both are one number.
        shared: the bytes of shared memory per block.
        limit: the largest number of these bytes that the GPU allows.
        matrix: the number of matrix instructions in the code, by kind.
        copies: the number of instructions that copy to shared memory asynchronously, by kind.
        taken: the specialisation of each parameter that the caller named.
        failed: the reason why it does not compile, or None. If it does not, all figures are 0.
        phase: the part of a call that launched it.
    """

    name: str
    config: Mapping[str, Any]
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0
    limit: int = 0
    matrix: Mapping[str, int] = {}
    copies: Mapping[str, int] = {}
    taken: Mapping[str, str] = {}
    failed: str | None = None
    phase: str = ""

    @property
    def launches(self) -> bool:
        """Whether a GPU of this architecture can launch it."""
        return self.failed is None and self.shared <= self.limit

    @property
    def spills(self) -> bool:
        """Whether registers spill to memory because there are too few."""
        return self.spill_stores + self.spill_loads > 0

    @property
    def mark(self) -> str:
        """What is wrong with the kernel, in a word or two, or ""."""
        if self.failed is not None:
            return "does not compile"
        if not self.launches:
            return "cannot launch"
        return "spills" if self.spills else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tables = {name: dict(getattr(self, name)) for name in ("config", "matrix", "copies", "taken")}
        return {**self._asdict(), **tables, "launches": self.launches}


class CompileReport(NamedTuple):
    """The kernels compiled for an architecture, with the versions of the compilers."""

    arch: str
    kernels: tuple[KernelReport, ...]
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arch": self.arch,
            "versions": dict(self.versions),
            "kernels": [kernel.as_dict() for kernel in self.kernels],
            "total": {
                "kernels": len(self.kernels),
                "cannot_launch": sum(k.failed is None and not k.launches for k in self.kernels),
                "do_not_compile": sum(k.failed is not None for k in self.kernels),
                "spill": sum(k.spills for k in self.kernels),
            },
        }

    def __str__(self) -> str:
        made = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines, phase = [f"{self.arch}, {made}"], ""
        for k in self.kernels:
            if k.phase != phase:
                phase = k.phase
                lines += ["", phase]
            config = " ".join(f"{name}={value}" for name, value in k.config.items())
            lines.append(f"  {k.name} ({config}){': ' + k.mark if k.mark else ''}")
            if k.taken:
                lines.append(f"    taken for {_grouped(k.taken)}")
            if k.failed is not None:
                lines.append(f"    {k.failed}")
                continue
            matrix = ", ".join(f"{n} {kind}" for kind, n in k.matrix.items()) or "none"
            spills = f"{k.spill_stores} stored, {k.spill_loads} loaded" if k.spills else "none"
            copies = ", ".join(f"{n} {kind}" for kind, n in k.copies.items())
            lines.append(
                f"    registers {k.registers}, stack {k.stack}, spills {spills}; "
                f"shared {k.shared:,} of {k.limit:,}; matrix instructions {matrix}"
                + (f"; asynchronous copies {copies}" if copies else "")
            )
        return "\n".join([*lines, "", self._total()])

    def _total(self) -> str:
        total = self.as_dict()["total"]
        n, broken, large, spill = (total[x] for x in ("kernels", "do_not_compile", "cannot_launch", "spill"))
        return (
            f"{n} {'kernel' if n == 1 else 'kernels'}: {broken or 'none'} {_verb(broken, 'do', 'does')} not compile, "
            f"{large or 'none'} {_verb(large, 'want', 'wants')} more shared memory than there is, "
            f"{spill or 'none'} {_verb(spill, 'spill', 'spills')} (stack, spills: bytes a thread, or registers on AMD)"
        )


def _verb(n: int, many: str, one: str) -> str:
    """Return the verb that fits the number n; "none" takes the singular."""
    return one if n < 2 else many


def _grouped(taken: Mapping[str, str]) -> str:
    """Describe parameters, those with equal descriptions together."""
    names: dict[str, list[str]] = {}
    for name, said in taken.items():
        names.setdefault(said, []).append(name)
    return "; ".join(f"{', '.join(group)}: {said}" for said, group in names.items())
