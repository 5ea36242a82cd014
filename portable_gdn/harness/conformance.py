"""Tests for any backend: ``pytest --pyargs portable_gdn.harness.conformance --portable-gdn-backends=mine``."""

from __future__ import annotations

from typing import Any

import pytest

from .fuzz import check
from .properties import PROPERTIES

__all__ = ["test_case", "test_property"]


@pytest.mark.portable_gdn(suite="standard")
def test_case(gdn_backend: Any, gdn_case: Any, gdn_verify: Any) -> None:
    """Outputs, states and gradients of one case lie within the budget."""
    gdn_verify(gdn_backend, gdn_case)


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(gdn_backend: Any, name: str) -> None:
    """One property holds on cases drawn at random."""
    check(gdn_backend.name, properties=[name])
