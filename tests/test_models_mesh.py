"""Whole models over several devices: 8 of the CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("jax")
pytest.importorskip("flax.nnx")

from mesh_program import run_on_devices
from whole import ported


@pytest.mark.slow
def test_a_model_over_devices_computes_what_one_does(tmp_path):
    found = run_on_devices("models_mesh_program.py", str(ported(tmp_path, "qwen3_next")))
    assert found["error"] < 1e-5
    assert found["tokens"]
    places = found["places"]
    assert places["embed.embedding"] == "('tensor', 'data')"
    assert places["layers.0.mixer.q_proj.kernel"] == "(None, 'data', 'tensor')"  # three layers, stacked
    assert places["layers.0.mlp.experts.down_proj"] == "(None, 'expert', 'tensor', 'data')"
    assert places["layers.1.attention.q_proj.kernel"] == "('data', 'tensor')"
    assert places["layers.1.attention.o_proj.kernel"] == "('tensor', 'data')"
    assert places["layers.1.mlp.shared_expert.up_proj.kernel"] == "('data', 'tensor')"
    assert places["lm_head.kernel"] == "('data', 'tensor')"
    assert found["share"] <= 1 / 4
