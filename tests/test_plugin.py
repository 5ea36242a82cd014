"""The pytest plugin, on a backend of another package that registers itself by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

THIRD_PARTY = Path(__file__).parent / "third_party"


def run_pytest(folder, *arguments, **environment):
    """pytest in a process and a folder of its own, with the other package on its path."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(THIRD_PARTY), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


MINE = "--portable-gdn-backends=mine"
CONFORMANCE = ("--pyargs", "portable_gdn.harness.conformance", MINE)


def test_a_third_party_backend_runs_the_suite_without_a_line_of_code(tmp_path):
    done = run_pytest(
        tmp_path, *CONFORMANCE, "--portable-gdn-suite=quick", "-k", "test_case or causality or neighbours"
    )
    assert done.returncode == 0, done.stdout
    assert "9 passed, 1 skipped" in done.stdout  # it has no masks
    assert "failed" not in done.stdout


@pytest.mark.slow
def test_a_third_party_backend_passes_everything(tmp_path):
    done = run_pytest(tmp_path, *CONFORMANCE)
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout


@pytest.mark.slow
def test_its_fault_fails_the_suite(tmp_path):
    done = run_pytest(tmp_path, *CONFORMANCE, "--portable-gdn-suite=quick", "-k", "test_case and KDA", MINE_FAULT="1")
    assert done.returncode == 1
    assert "mine, KDA:\n" in done.stdout
    assert "grad_g: error" in done.stdout


@pytest.mark.slow
def test_fixtures_and_marker_in_tests_of_ones_own(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.portable_gdn(suite='quick')\n"
        "def test_it(gdn_backend, gdn_case, gdn_verify):\n"
        "    assert gdn_backend.name == 'mine'\n"
        "    if gdn_case.name == 'one token':\n"
        "        gdn_verify(gdn_backend, gdn_case)\n"
    )
    done = run_pytest(tmp_path, "--strict-markers", MINE, "test_own.py")
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout
    done = run_pytest(tmp_path, "test_own.py")
    assert "8 skipped" in done.stdout  # and says how to name a backend
    done = run_pytest(tmp_path, "--portable-gdn-backends=nonesuch", "test_own.py")
    assert done.returncode == 1
    assert "it must be one of" in done.stdout


def test_the_command_line_sees_it_too():
    code = "import sys; sys.argv = ['portable-gdn', 'info', '--json']; from portable_gdn.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(THIRD_PARTY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert '"mine"' in done.stdout
