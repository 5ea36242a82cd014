"""A TPU's roundings on a CPU: what each precision rounds, and that errors are those which its declaration expects."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from portable_gdn import dispatch
from portable_gdn.cli.main import app
from portable_gdn.harness.cases import Case, build
from portable_gdn.harness.compute import Settings, backend_for, one, with_settings
from portable_gdn.harness.judge import judge
from portable_gdn.harness.record import record
from portable_gdn.harness.truth import Truth
from portable_gdn.spec.errors import GdnError

pytest.importorskip("jax")

CASE = Case("GDN", T=65, HV=4, K=32, V=32)


def bfloat16(x):
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("names", [("q", "k"), ("T", "R")])
@pytest.mark.parametrize("precision", ["fast", "default", "highest"])
def test_each_product_rounds_what_a_matrix_unit_does(precision, names):
    import jax

    from portable_gdn.backends.xla_chunks import product as _product

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 32, 32)).astype(np.float32), rng.normal(size=(2, 32, 32)).astype(np.float32)
    found = np.asarray(jax.jit(lambda a, b: _product(precision, True)(a, b, *names))(a, b), np.float64)
    a, b = a.astype(np.float64), b.astype(np.float64)
    one_pass = precision == "fast" or (precision == "default" and names == ("q", "k"))
    if one_pass:
        expected = bfloat16(a) @ bfloat16(b)
    elif precision == "default":
        low_a, low_b = bfloat16(a - bfloat16(a)), bfloat16(b - bfloat16(b))
        expected = bfloat16(a) @ bfloat16(b) + low_a @ bfloat16(b) + bfloat16(a) @ low_b
    else:
        expected = a @ b
    scale = np.abs(a) @ np.abs(b)
    assert np.all(np.abs(found - expected) <= 2.0**-21 * scale)  # the order of float32 sums, and nothing else
    assert one_pass == bool(np.abs(found - a @ b).max() > 1e-3)
    plain = np.asarray(_product(precision, False)(a.astype(np.float32), b.astype(np.float32), *names), np.float64)
    assert np.all(np.abs(plain - a @ b) <= 2.0**-21 * scale)  # left alone, a CPU rounds no operand


@pytest.mark.parametrize("precision", ["fast", pytest.param("default", marks=pytest.mark.slow)])
def test_the_emulated_error_is_the_expected_one(precision):
    settings = Settings(emulate=precision)
    backend = backend_for("xla", settings)
    inputs = with_settings(build(CASE), settings)
    found = one(backend, "x", inputs, settings)
    truth = Truth(inputs)
    expectation = truth.expectation(found.rounding)
    for name, value in found.tensors.items():
        verdict = judge(name, value, expectation, truth.problem.signature)
        assert verdict.ok
        assert verdict.error > 1e-5  # float32 products would be near 1e-7
        assert verdict.error > 0.05 * verdict.expected
    assert dispatch.get("xla").emulates is False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", "pallas-interpret"])
def test_the_command_predicts_a_tpu(tmp_path, name):
    """A float32 run of a GPU beside what a TPU would make of it: within what is expected of both."""
    path = tmp_path / "gpu.safetensors"
    record(path, backend_for("numpy", Settings()), "standard", [CASE], Settings())
    found = CliRunner().invoke(app, ["compare", str(path), "-b", name, "--emulate", "fast"])
    assert found.exit_code == 0, found.output
    assert "e-03" in found.stdout


def test_what_cannot_be_emulated():
    with pytest.raises(GdnError, match=r"go with a backend that can: xla, pallas-interpret"):
        backend_for("numpy", Settings(emulate="fast"))
    with pytest.raises(GdnError, match="precision is 'highest' and emulate 'fast'; give one of them"):
        backend_for("xla", Settings(precision="highest", emulate="fast"))
