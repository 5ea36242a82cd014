"""The scripts of examples/ run as they stand, each in a process of its own, in their small form."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

#: Each script: what it needs, the arguments of its small form, and what it then says.
RUNS = {
    "first_call.py": ((), (), "relative error"),
    "port_and_generate.py": (
        ("jax", "flax", "transformers"),
        ("--tokens", "4"),
        "equal to transformers' in 4 of 4 tokens",
    ),
    "serve.py": (("jax", "flax"), ("--requests", "12"), "logits differ from those of whole sequences by"),
    "two_machines.py": (("jax", "torch"), (), "equal within what both declare"),
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
