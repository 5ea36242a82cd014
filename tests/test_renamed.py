"""Old import paths go on working, with a warning that names the new one."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("old", "new", "name", "needs"),
    [
        ("portable_gdn.tpu.integrations.nnx", "portable_gdn.layers", "GatedDeltaNet", "flax"),
        ("portable_gdn.tpu.integrations.torchax", "portable_gdn.integrations.torchax", "Torchax", "jax"),
        ("portable_gdn.gpu.integrations", "portable_gdn.integrations", "patch_transformers", "torch"),
        ("portable_gdn.gpu.integrations.transformers", "portable_gdn.integrations.transformers", "MODELS", "torch"),
    ],
)
def test_a_module_that_moved_is_found_by_its_old_name(old, new, name, needs):
    pytest.importorskip(needs)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module(old).nothing  # noqa: B018


def test_packages_are_found_by_name_and_a_misspelt_name_gets_a_guess():
    import portable_gdn as pg

    assert pg.ops is importlib.import_module("portable_gdn.ops")
    with pytest.raises(AttributeError, match="did you mean 'gated_delta_rule'"):
        pg.gated_delta_rul  # noqa: B018
