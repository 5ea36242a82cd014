"""Every kernel that calls of the rule launch on a GPU, compiled on this CPU: registers, spills, shared memory.

    python benchmarks/gpu_compile.py            # compile all, compare with gpu_compile.json beside this file
    python benchmarks/gpu_compile.py --write    # and keep the new figures there

Figures belong to the versions of Triton and flash-linear-attention that they were made with; the file holds them by
version. With others, what is compared with is the newest on file: so a new release shows what changed in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from portable_gdn.gpu.versions import versions
from portable_gdn.harness.gpu_report import gpu_reports
from portable_gdn.harness.shapes import Shape
from portable_gdn.spec.errors import GdnError

FILE = Path(__file__).with_suffix(".json")
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
VARIANTS = ("gdn", "kda", "gdn2", "gla")
OPERATIONS = ("backward", "step")
SHAPE = Shape(seqlen=2048, heads=16, value_heads=32)
FIGURES = ("registers", "stack", "spill_stores", "spill_loads", "shared", "matrix", "failed")

Kernels = dict[str, dict[str, Any]]


def made_with() -> str:
    """The versions that figures depend on."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def measure(arch: str, progress: Any = None) -> Kernels:
    """Figures of every kernel, by what launches it and its configuration."""
    (report,) = gpu_reports(OPERATIONS, VARIANTS, SHAPE, [arch], progress=progress)
    if isinstance(report, GdnError):
        raise report
    found: Kernels = {}
    for kernel in report.kernels:
        config = " ".join(f"{name}={value}" for name, value in kernel.config.items())
        figures = {name: value for name in FIGURES if (value := getattr(kernel, name))}
        found[f"{kernel.phase}: {kernel.name} ({config})"] = figures
    return found


def on_file() -> dict[str, dict[str, Kernels]]:
    """Figures by versions, architecture and kernel."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def newest(stored: Mapping[str, Any]) -> str:
    """Of the versions on file, the last."""
    return max(stored, key=lambda v: [int(n) for part in v.split(", ") for n in part.split()[1].split(".")])


def changes(before: Kernels, after: Kernels) -> list[str]:
    """What is new, gone or different, a line each."""
    lines = [f"gone: {name}" for name in before if name not in after]
    for name, figures in after.items():
        old = before.get(name)
        if old is None:
            lines.append(f"new: {name}: {figures}")
            continue
        different = [n for n in FIGURES if figures.get(n, 0) != old.get(n, 0)]
        if different:
            lines.append(f"{name}: " + ", ".join(f"{n} {old.get(n, 0)} -> {figures.get(n, 0)}" for n in different))
    return lines


def main() -> int:
    """Compile, compare, and perhaps write. The exit code is 1 if something changed or does not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the new figures")
    parser.add_argument("--arch", choices=ARCHS, help="this one alone")
    options = parser.parse_args()
    console, messages = Console(highlight=False), Console(stderr=True, highlight=False)
    stored = on_file()
    base = made_with() if made_with() in stored else newest(stored) if stored else None
    console.print(f"{made_with()}, compared with {base or 'nothing'}")
    kept, wrong = dict(stored.get(made_with(), {})), False
    for arch in ARCHS if options.arch is None else (options.arch,):
        with messages.status(arch) as status:
            found = measure(arch, lambda name, arch=arch, status=status: status.update(f"{arch} {name}"))
        lines = changes(stored[base].get(arch, {}), found) if base is not None else []
        spilling = sum("spill_stores" in figures for figures in found.values())
        failed = [name for name, figures in found.items() if "failed" in figures]
        console.print(f"{arch}: {len(found)} kernels, {spilling} spill, {len(failed)} do not compile")
        for line in lines:
            console.print(f"  {line}", markup=False)
        wrong |= bool(lines or failed)
        kept[arch] = found
        if options.write:  # after each, so that a long run that ends early has not been for nothing
            stored[made_with()] = kept
            FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return int(wrong and not options.write)


if __name__ == "__main__":
    sys.exit(main())
