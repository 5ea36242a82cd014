"""Rows of several segments, and convolutions of padded rows, in the kernels: values, and that no neighbour is seen."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_all_close, assert_close, cotangents, make, oracle

from portable_gdn import door
from portable_gdn.harness.cases import Case
from portable_gdn.harness.verify import verify
from portable_gdn.spec.problem import Options
from portable_gdn.tpu.backend import PALLAS_INTERPRET

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

NAME = "pallas-interpret"
IDS = np.repeat([[5, 3, 5]], [11, 17, 12], axis=1).astype(np.int32).repeat(2, 0)  # an id may come back
LONG = {"K": 128, "V": 128, "T": 300, "H": 1, "HV": 2, "dtype": "bfloat16"}

pytestmark = pytest.mark.usefixtures("tpu_backends")


@pytest.fixture(autouse=True, scope="module")
def compiled_fast():
    """Each program runs once or twice: not worth what XLA would take to optimise it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def both(x, d, chunk_size=16):
    """Output, state and cotangents."""
    operands = {name: jnp.asarray(a) for name, a in x.items()}
    problem, _ = door.normalise(operands, Options(output_final_state=True, chunk_size=chunk_size), NAME)
    result, grads = PALLAS_INTERPRET.gradients(problem, {name: jnp.asarray(a) for name, a in d.items()})
    return np.asarray(result.o), np.asarray(result.state), {name: np.asarray(a) for name, a in grads.items()}


@pytest.mark.parametrize("variant", ["GDN", pytest.param("KDA", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [False, True])
def test_segments_are_the_oracle_s(variant, masked):
    x = {**make(variant, state=True), "segment_ids": IDS}
    if masked:
        x["mask"] = np.random.default_rng(6).uniform(size=(2, 40)) < 0.6
    d = cotangents(x)
    want = oracle(x, d)
    o, state, grads = both(x, d)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    assert_all_close(grads, want, eps=16)


def test_nan_in_one_segment_never_reaches_another():
    x = {**make("GDN", state=True), "segment_ids": IDS}
    d = cotangents(x)
    y = {**x, "v": x["v"].copy()}
    y["v"][0, 15] = np.nan
    o, state, grads = both(x, d)
    o_y, state_y, grads_y = both(y, d)
    here = np.zeros((2, 40), bool)
    here[0, 11:28] = True
    np.testing.assert_array_equal(o_y[~here], o[~here])
    np.testing.assert_array_equal(state_y, state)
    assert np.isnan(o_y[0, 15:28]).all()
    for name in set(grads) - {"initial_state"}:
        np.testing.assert_array_equal(grads_y[name][~here], grads[name][~here], err_msg=name)
        assert np.isnan(grads_y[name][here]).all(), name
    np.testing.assert_array_equal(grads_y["initial_state"], grads["initial_state"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("long, segments", layout="segments", **LONG),
        Case("long, mixer, holes", layout="holes", conv=4, l2norm=True, gate="softplus", **LONG),
        Case("long, mixer, segments", layout="segments", conv=4, l2norm=True, gate="softplus", **LONG),
        Case("long, segments, KDA", layout="segments", variant="KDA", **LONG),
    ],
    ids=lambda c: c.name,
)
def test_long_rows_take_the_pipeline_and_hold(case, monkeypatch):
    served = []
    real = PALLAS_INTERPRET.gradients
    monkeypatch.setattr(
        PALLAS_INTERPRET, "gradients", lambda p, d: served.append(PALLAS_INTERPRET.serves(p.signature)) or real(p, d)
    )
    report = verify([NAME], full=True, cases=[case], in_process=True)
    assert served
    assert served[0].startswith("pipelined kernel")
    assert not [row for row in report.rows if not row.ok]
    assert [row for row in report.rows if row.judged and row.tensor in ("o", "state")]
