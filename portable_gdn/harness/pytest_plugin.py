"""A pytest plugin for authors of kernels: ``pytest --portable-gdn-backends=mine``.

It provides

- the option ``--portable-gdn-backends``, with names of backends separated by commas. Each is registered by an entry
  point of the group ``portable_gdn.backends``, or in a conftest with ``portable_gdn.register_backend``;
- the fixture ``gdn_backend``, which is each of these backends in turn;
- the fixture ``gdn_case``, which is each case of a suite, by default of "quick";
- the marker ``portable_gdn(suite="standard")``, which chooses the suite;
- the fixture ``gdn_verify``: ``gdn_verify(backend, case)`` fails the test if the backend exceeds its budget.

``pytest --pyargs portable_gdn.harness.conformance --portable-gdn-backends=mine`` runs the suite and the properties on a
backend without a line of code. Until one of these is used, the plugin imports only pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["gdn_backend", "gdn_verify", "pytest_addoption", "pytest_configure", "pytest_generate_tests"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--portable-gdn-backends``."""
    group = parser.getgroup("portable-gdn")
    group.addoption(
        "--portable-gdn-backends", default="", metavar="NAMES", help="backends to hold to the specification, by commas"
    )
    group.addoption("--portable-gdn-suite", default=None, metavar="NAME", help="quick, standard or full, for gdn_case")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``portable_gdn``."""
    config.addinivalue_line("markers", "portable_gdn(suite): which suite of cases the fixture gdn_case runs through")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each backend and case."""
    if "gdn_backend" in metafunc.fixturenames:
        names = [name.strip() for name in metafunc.config.getoption("--portable-gdn-backends").split(",")]
        metafunc.parametrize("gdn_backend", [name for name in names if name] or [None], indirect=True)
    if "gdn_case" in metafunc.fixturenames:
        from portable_gdn.harness.suites import suite

        marker = metafunc.definition.get_closest_marker("portable_gdn")
        chosen = metafunc.config.getoption("--portable-gdn-suite") or (marker.kwargs.get("suite") if marker else None)
        metafunc.parametrize("gdn_case", suite(chosen or "quick"), ids=lambda case: case.name)


@pytest.fixture
def gdn_backend(request: pytest.FixtureRequest) -> Any:
    """Provide each backend of ``--portable-gdn-backends`` in turn."""
    from portable_gdn import dispatch

    if request.param is None:
        pytest.skip("no backend was named with --portable-gdn-backends")
    backend = dispatch.get(request.param)
    why = backend.not_here()
    if why is not None:
        pytest.fail(f"backend {request.param!r} cannot run here: {why}", pytrace=False)
    return backend


@pytest.fixture
def gdn_verify() -> Callable[[Any, Any], None]:
    """Provide a function that compares a backend with the oracle on one case.

    It skips the test if the backend does not compute such calls.
    """
    from portable_gdn.harness.verify import verify

    def run(backend: Any, case: Any) -> None:
        report = verify([backend.name], full=True, cases=[case])
        for item in report.not_run:
            pytest.skip(f"{item.backend}: {item.why}")
        wrong = [
            f"{row.tensor}: error {row.error:.2e}, budget {row.budget:.2e} in head {row.head} {row.note}".rstrip()
            for row in report.rows
            if row.backend == backend.name and not row.ok
        ]
        if wrong:
            pytest.fail(f"{backend.name}, {case.name}:\n  " + "\n  ".join(wrong), pytrace=False)

    return run
