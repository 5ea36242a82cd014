"""The resources that a compiled kernel uses, read from the assemblers' output and from the code."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["Log", "assembler_log", "usage"]

MATRIX = {  # the patterns in the code for each kind of matrix instruction
    "cuda": {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"},
    "hip": {"mfma": "v_mfma", "wmma": "v_wmma"},
}
COPIES = {  # the patterns for asynchronous copies to shared memory
    "cuda": {"cp.async": r"cp\.async\.c[ag]\.", "TMA": r"cp\.async\.bulk\.tensor"},
    "hip": {"loads to LDS": r"(?:buffer|global)_load_lds|buffer_load_\w+ .*\blds\b"},
}


class Log:
    """The assembler's output during a block; complete when the block has ended."""

    text = ""


@contextlib.contextmanager
def assembler_log() -> Iterator[Log]:
    """Collect the output of ptxas, which Triton can print to standard output. Triton's cache is not used meanwhile."""
    from triton import knobs

    log, out = Log(), io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        try:
            with contextlib.redirect_stdout(out):
                yield log
        finally:
            log.text = out.getvalue()


def usage(compiled: Any, log: str) -> dict[str, Any]:
    """Return the fields of a ``KernelReport`` from a compiled kernel and the assembler's output."""
    found = _cuda(compiled, log) if "ptx" in compiled.asm else _hip(compiled)
    return {**found, "shared": int(compiled.metadata.shared)}


def _cuda(compiled: Any, log: str) -> dict[str, Any]:
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or frame is None:
        raise ValueError("ptxas did not say what the kernel takes")
    stack, stores, loads = map(int, frame.groups())
    return {
        "registers": int(registers[1]),
        "stack": stack,
        "spill_stores": stores,
        "spill_loads": loads,
        "matrix": _count(compiled.asm["ptx"], "cuda"),
        "copies": _copies(compiled.asm["ptx"], "cuda"),
    }


def _hip(compiled: Any) -> dict[str, Any]:
    code = compiled.asm["amdgcn"]
    field = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", code)[1])  # type: ignore[index]  # noqa: E731
    spills = field("vgpr_spill_count")
    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "spill_stores": spills,
        "spill_loads": spills,
        "matrix": _count(code, "hip"),
        "copies": _copies(code, "hip"),
    }


def _count(code: str, backend: str) -> dict[str, int]:
    found = {kind: code.count(text) for kind, text in MATRIX[backend].items()}
    found["of them tf32"] = len(re.findall(r"mma\S*\.tf32\.tf32|v_mfma\S*_xf32", code))
    return {kind: n for kind, n in found.items() if n}


def _copies(code: str, backend: str) -> dict[str, int]:
    found = {kind: len(re.findall(pattern, code)) for kind, pattern in COPIES[backend].items()}
    return {kind: n for kind, n in found.items() if n}
