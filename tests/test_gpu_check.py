"""The script for whoever has a GPU, as far as it goes without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")):
    pytest.skip("FLA is not installed", allow_module_level=True)


def run(*words, **environment):
    done = [sys.executable, SCRIPT, *words]
    return subprocess.run(done, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
def test_it_checks_writes_and_says_what_was_left_out(tmp_path):
    done = run("--backend", "fla-interpret", "--seconds", "40", "-o", tmp_path / "found.json", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    first = found["proof"][0]
    assert first["case"] == "GDN"
    assert first["ok"]
    assert 0 < first["error"] <= first["budget"]
    assert found["environment"]["packages"]["torch"]
    left = [row["case"] for row in found["proof"] if "left_out" in row]
    assert left
    assert f"left out, since the time was over: {left[0]}" in done.stdout.replace("\n", " ")
    assert [row["case"] for row in found["stages"]] == ["GDN", "KDA", "GDN-2", "GLA"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


def test_without_a_gpu_it_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("-o", tmp_path / "found.json", TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert "gpu_check: backend 'fla' cannot run here: there is no GPU that torch can use" in done.stderr
    assert not (tmp_path / "found.json").exists()
