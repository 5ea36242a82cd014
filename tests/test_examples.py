"""The scripts of examples/ run as they stand, each in a process of its own, in their small form."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

#: Each script: what it needs, the arguments of its small form, and what it then says.
RUNS = {
    "first_call.py": ((), (), "relative error"),
    "many_chips.py": (
        ("jax", "flax", "optax"),
        ("--devices", "4", "--steps", "2", "--tokens", "16", "--hidden", "32"),
        "a sequence of 64 tokens, 16 per device: differs by",
    ),
    "port_and_generate.py": (
        ("jax", "flax", "transformers"),
        ("--tokens", "4"),
        "equal to transformers' in 4 of 4 tokens",
    ),
    "serve.py": (("jax", "flax"), ("--requests", "12"), "logits differ from those of whole sequences by"),
    "two_machines.py": (("jax", "torch"), (), "the fault is found, as shown"),
    "triton_to_pallas.py": (("jax", "torch", "triton"), (), "in_chunks       differs from the oracle by"),
    "train_layer.py": (("jax", "flax", "optax"), ("--steps", "2"), "step    1: loss"),
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name):
    needs, arguments, says = RUNS[name]
    for module in needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert len([line for line in (EXAMPLES / name).read_text().splitlines() if line.strip()]) < 102


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    for module in ("IPython", "jax", "torch"):
        pytest.importorskip(module)
    cells = json.loads((EXAMPLES / "two_machines.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n".join(code))
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "they part, as shown" in done.stdout
    assert "head 1, token 50" in done.stdout
