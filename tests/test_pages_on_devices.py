"""Pages about several devices: their blocks, one after the other, on CPU devices."""

from __future__ import annotations

import pytest

for module in ("jax", "flax", "safetensors"):
    pytest.importorskip(module)

from checkpoints import checkpoint  # noqa: E402
from mesh_program import run_on_devices  # noqa: E402


@pytest.mark.slow
def test_many_chips():
    assert run_on_devices("page_program.py", "many-chips.md")["blocks"] == 4


@pytest.mark.slow
def test_from_a_gpu_to_several_devices(tmp_path):
    from portable_gdn.checkpoint import port

    port(checkpoint(tmp_path / "src", "fla_gated_deltanet"), tmp_path / "my-gdn-nnx", "nnx")
    folder, width = str(tmp_path / "my-gdn-nnx"), "64"
    found = run_on_devices(
        "page_program.py", "one-layer.md", f"my-gdn-nnx=>{folder}", f"4096, 2048=>40, {width}", devices=2
    )
    assert found["blocks"] == 2
