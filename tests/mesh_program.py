"""What tests on several virtual CPU devices share: the process they run in, cases, shardings, what XLA made of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def run_on_devices(script: str, *arguments: str, devices: int = 8) -> dict:
    """What a script of this folder prints last, as JSON, in a process that sees so many CPU devices."""
    # Programs run once: XLA need not optimise them.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def collectives(text: str) -> dict[str, list[int]]:
    """Sizes in elements of what each kind of collective returns, by kind, from a compiled program's text."""
    found: dict[str, list[int]] = {}
    for kind in COLLECTIVES:
        for line in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
            sizes = [eval("*".join(dims.split(",")) or "1") for dims in re.findall(r"\w\d+\[([\d,]*)\]", line)]
            found.setdefault(kind, []).append(max(sizes))
    return found
