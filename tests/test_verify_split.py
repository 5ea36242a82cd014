"""``verify --devices``: calls split over rows, heads and tokens of virtual CPU devices, and faults that it finds."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from mesh_program import run_on_devices

from portable_gdn import GdnError
from portable_gdn.harness.verify import cases_for, verify


@pytest.mark.slow
def test_split_calls_hold_and_faults_are_found():
    found = run_on_devices("split_faults_program.py", devices=4)
    assert found["tokens, no fault"] == found["heads, no fault"] == []
    assert {"o", "state", "grad_qkv"} <= set(found["a map transposed"])
    assert {"o", "grad_conv_weight"} <= set(found["a halo of the wrong neighbour"])
    assert found["a gradient not summed"] == ["grad_k", "grad_q"]


@pytest.mark.slow
def test_every_way_of_splitting_has_a_process():
    cases = [case for case in cases_for(False) if case.name in ("two rows, tile-grouped", "no tokens")]
    report = verify(cases=cases, full=True, devices=2)
    assert report.ok
    assert {row.backend for row in report.rows} == {f"xla split by {way}" for way in ("rows", "heads", "tokens")}
    assert {item.case for item in report.not_run} == {"no tokens"}


def test_what_cannot_be_split_gets_a_sentence():
    with pytest.raises(GdnError, match="backend 'torch' takes no JAX arrays, which are what --devices splits"):
        verify(["torch"], devices=2)
    with pytest.raises(GdnError, match="devices is 1; it must be at least 2"):
        verify(devices=1)
