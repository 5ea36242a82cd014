"""Two processes of torch: calls of DTensors against the same calls of one process, and FSDP2 around a patched model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_hosts import free_port


@pytest.mark.slow
def test_two_processes():
    model = ["model"] if importlib.util.find_spec("transformers") else []
    program = [sys.executable, str(Path(__file__).with_name("torch_processes_program.py"))]
    where = free_port()
    both = [
        subprocess.Popen(
            [*program, str(rank), where, *model], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (said, errors) in zip(both, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
        found = json.loads(said.splitlines()[-1])
        assert len(found) == 7 + len(model)
        for name, result in found.items():
            assert max(result.values()) < 3e-6, (name, result)
