"""Calls split over rows and heads of a mesh: on 8 CPU devices, and compiled for several TPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from mesh_program import run_on_devices

import portable_gdn as pg

KINDS = ("auto", "explicit")
TOKENS = 4 * 40 * 4 * 8 // 8  # elements of q on one device


@pytest.fixture(scope="module")
def found():
    return run_on_devices("sharding_program.py")


@pytest.mark.slow
def test_shards_compute_what_one_device_does(found):
    cases = [name for name in found if name.endswith(KINDS)]
    assert len(cases) == 14
    for name in cases:
        result = found[name]
        assert max(result["forward"], result["gradient"], result.get("eager", 0)) < 2e-6, (name, result)
        assert "'data'" in result["o"], (name, result)
        assert "'heads'" in result["o"], (name, result)


@pytest.mark.slow
def test_nothing_with_tokens_is_in_a_collective(found):
    for kind in KINDS:
        for name in ("rule", "step", "vmap"):
            assert found[f"{name}, {kind}"]["collectives"] == found[f"{name}, {kind}"]["collectives of both"] == {}
        # The gradient of key heads that all devices of an axis share is summed over them, in one go.
        for name in ("layers", "key heads that do not divide"):
            assert found[f"{name}, {kind}"]["collectives"] == {}
            assert [*found[f"{name}, {kind}"]["collectives of both"]] == ["all-reduce"]
        # The mixer's convolution has weights and a state of all channels: those are gathered, and weights' gradients
        # summed over the rows.
        mixer = found[f"mixer, {kind}"]
        assert [*mixer["collectives"]] == ["all-gather"]
        assert max(mixer["collectives"]["all-gather"]) < TOKENS
        assert set(mixer["collectives of both"]) == {"all-gather", "all-reduce"}
        assert max(max(sizes) for sizes in mixer["collectives of both"].values()) < TOKENS


@pytest.mark.slow
def test_other_ways_in(found):
    assert found["interpreted"]["error"] < 2e-6
    assert "'data'" in found["interpreted"]["o"]
    for name in ("states on the way", "tokens of one operand", "inside a shard_map over rows"):
        assert found[name] < 2e-6, name
    assert "B=2 T=40 N=2 H=1 HV=2" in found["explain"]


@pytest.mark.slow
def test_what_cannot_be_split_gets_a_sentence(found):
    begins = {
        "rows": "B is 3; it must be a multiple of the 2 devices of 'data'",
        "heads": "HV is 6; it must be a multiple of the 4 devices of 'heads'",
        "name": "sharding.batch is 'date', which is no axis of the mesh; its axes are",
        "no mesh": "sharding.mesh is None, and no mesh is current; it must be a mesh, or be set by jax.set_mesh.",
        "no sharding": "sharding is a str; it must be None or a portable_gdn.Sharding.",
        "packed": "sharding.batch is ('data',); it must be None where cu_seqlens is given",
        "numpy": "sharding is given with numpy arrays; it must come with JAX arrays",
        "devices": "q is on cpu:0, cpu:1",
        "explicit tokens": "q is sharded over its tokens by 'data'; give sharding=portable_gdn.Sharding(sequence=...)",
        "explicit channels": "k is sharded by 'heads' along an axis that cannot be split",
        "manual": "sharding.batch is 'data'; it must leave out the axes of the jax.shard_map around the call",
        "twice": "sharding.heads names the axis 'data', which sharding.batch names already",
    }
    assert found["sentences"].keys() == begins.keys()
    for name, begin in begins.items():
        assert found["sentences"][name].startswith(begin), found["sentences"][name]


def test_a_sharding_is_checked_when_it_is_made():
    with pytest.raises(pg.GdnError, match=r"sharding\.heads is 3; it must be None, the name of an axis"):
        pg.Sharding(heads=3)
    with pytest.raises(pg.GdnError, match="batches is no keyword of Sharding; did you mean 'batch'"):
        pg.Sharding(batches="data")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("topology", "rows", "heads"), [("v5e:2x2", 2, 2), ("v6e:2x4", 2, 4)])
def test_compiles_for_several_tpus(topology, rows, heads):
    """Forward and gradient: by the kernel where the call says how it is split; else by xla, with a warning."""
    from portable_gdn.tpu.scheduling.compile import environment

    env = dict(os.environ)
    environment(env)
    env["TPU_ACCELERATOR_TYPE"] = f"{topology[:3]}-{rows * heads}"
    program = Path(__file__).parent / "sharding_on_tpu.py"
    done = subprocess.run(
        [sys.executable, program, topology, str(rows), str(heads)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    plain = {"kernels": 0, "collectives": {}, "warned": True}
    assert found["alone"] == plain
    assert found["alone, gradient"] == plain
    for name in ("split", "named", "shard_map"):
        assert found[name] == {"kernels": 1, "collectives": {}, "warned": False}, name
    assert found["split, gradient"] == {"kernels": 2, "collectives": {}, "warned": False}
    # The call itself, and two ways to the map of its piece, of which one runs: from its last tokens, or from all.
    assert found["tokens"]["kernels"] == 3
    assert set(found["tokens"]["collectives"]) <= {"all-to-all", "all-reduce", "collective-permute"}
    assert found["refused"].startswith("backend 'pallas' cannot run this call: the program is for several devices")
