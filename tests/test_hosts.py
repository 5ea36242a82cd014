"""Two processes, as of two hosts, that share a mesh: calls split over both, and a port that each reads its part of."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("jax", "flax", "safetensors"):
    pytest.importorskip(module)

from checkpoints import checkpoint  # noqa: E402


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.slow
def test_two_hosts(tmp_path):
    from portable_gdn.checkpoint import port

    port(checkpoint(tmp_path / "source", "fla_gated_deltanet"), tmp_path / "port", "nnx")
    where = free_port()
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    program = [sys.executable, str(Path(__file__).with_name("hosts_program.py"))]
    both = [
        subprocess.Popen(
            [*program, str(number), where, str(tmp_path / "port")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=500) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (said, errors) in zip(both, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
        found = json.loads(said.splitlines()[-1])
        layer = found.pop("layer")
        assert layer["y"] < 1e-5
        assert layer["part of q_proj on a device"] == 0.25
        assert set(found) == {"rows over hosts", "heads over hosts", "tokens over hosts"}
        for name, seen in found.items():
            assert max(seen["o"], seen["state"]) < 3e-6, (name, seen)
            assert seen["gradient"] < 1e-5, (name, seen)
            assert seen["held here"] == 0.5, (name, seen)
