"""Reports of whole layers: what is compiled, which part an operation belongs to, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from portable_gdn.harness.layer_report import LayerReport, LayerShape, layer_call
from portable_gdn.harness.shapes import Shape
from portable_gdn.spec.errors import GdnError
from portable_gdn.tpu.chips import CHIPS
from portable_gdn.tpu.scheduling.build import missing
from portable_gdn.tpu.scheduling.report import OperationReport, Schedule

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

SMALL = Shape(seqlen=40, heads=1, value_heads=2, key_dim=16, value_dim=8)


def layer(scope="layer", direction="forward", variant="gdn", **more):
    return LayerShape(scope, variant, direction, 32, SMALL, "fast", **more)


@pytest.mark.parametrize("variant", ["gdn", "kda", "gdn2"])
def test_what_is_compiled_is_the_layer_or_its_mixer(variant):
    function, args = layer_call(layer(variant=variant, backend="xla"))
    assert jax.eval_shape(function, *args).shape == (1, 40, 32)
    function, args = layer_call(layer("mixer", "train", variant, backend="xla"))
    o, gradients = jax.eval_shape(function, *args)
    assert o.shape == (1, 40, 16)  # as a projection reads it
    (bare,) = layer_call(layer("mixer", variant=variant, norm=False))[1]
    (arrays,), _ = args
    assert set(arrays) - set(bare) == {"output_norm.weight", "z"}
    assert {"qkv", "conv.weight", "output_norm.weight", "gate.A_log", "gate.dt_bias", "z", "g"} <= set(arrays)
    assert [a.shape for a in jax.tree.leaves(gradients)] == [a.shape for a in jax.tree.leaves(arrays)]


def operation(name, cycles, *, kernel=False, opcode="fusion", mxu=0.0, bytes_=0, times=1):
    return OperationReport(
        name, opcode, "", kernel, times, cycles, cycles, None, None, None, 0, {"MXU": mxu, "VALU": 1.0}, {}, 0, 0, 0,
        {}, (), 0, 0, bytes_, (),
    )  # fmt: skip


def report(*operations):
    kernels, others = (tuple(k for k in operations if k.kernel == kernel) for kernel in (True, False))
    memory = {"arguments": 0, "results": 1640}
    return LayerReport(layer(), Schedule("v6e", kernels, others, memory, {}))


def test_time_goes_to_its_part():
    clock = CHIPS["v6e"].clock_hz
    found = report(
        operation("rule", 700, kernel=True, mxu=350.0, times=2),
        operation("fusion.1", 70, mxu=35.0),
        operation("copy.3", 7, opcode="copy"),
        operation("reshape.1", 7, opcode="fusion", bytes_=16400),
        operation("reduce.2", 14),
    )
    seconds = found.seconds()
    want = {"kernels": 1400 / clock, "projections": 70 / clock, "copies": 7 / clock + 1e-8, "rest": 14 / clock}
    assert seconds == pytest.approx(want, rel=1e-3)
    assert found.total_seconds == pytest.approx(sum(want.values()), rel=1e-3)
    assert found.bytes()["copies"] == 16400
    assert found.floor_seconds == pytest.approx(735 / clock, rel=1e-3)
    json.dumps(found.as_dict())


def test_what_runs_nobody_knows_how_often_has_no_time():
    found = report(operation("fusion.1", 70, mxu=1.0, times=None), operation("copy", 7, opcode="copy"))
    assert found.seconds()["projections"] is None
    assert found.total_seconds is None
    assert found.floor_seconds is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"variant": "gla"}, "--variant is 'gla'; it must be one of gdn, kda, gdn2 for a layer."),
        ({"direction": "backward"}, "--direction is 'backward'; it must be one of forward, train for a layer."),
        ({"hidden": 0}, "--hidden-size is 0; it must be at least 1."),
        ({"backend": "torch"}, "--backend is 'torch'; it must be one of pallas, xla for a layer."),
        ({"norm": False}, "--no-norm is given for a layer; it must go with --op mixer: a layer has its norm."),
        ({"shape": SMALL._replace(sequences=2)}, "--sequences is 2; it must be 0 for a layer."),
    ],
)
def test_what_cannot_be_compiled_gets_a_sentence(change, sentence):
    with pytest.raises(GdnError) as error:
        layer_call(layer()._replace(**change))
    assert str(error.value) == sentence


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason="no TPU compiler")
def test_the_command_line(tmp_path):
    words = [
        "-m",
        "portable_gdn.cli.main",
        "tpu-report",
        "--op",
        "layer",
        "--direction",
        "train",
        "--hidden-size",
        "256",
    ]
    words += ["--seqlen", "512", "--heads", "1", "--value-heads", "2", "--precision", "fast"]
    env = {**os.environ, "PORTABLE_GDN_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, *words, "--json"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"]["seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert all(found["seconds"][part] > 0 for part in ("kernels", "projections"))
    assert "inside the backward kernel" in found["plan"]
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert "projections" in done.stdout
    assert "together" in done.stdout
