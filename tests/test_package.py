"""The package as it is shipped: what the wheel holds, which way imports point, that files can be read back."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_point_one_way():
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_has_every_subpackage(tmp_path):
    pytest.importorskip("build")
    source = tmp_path / "source"
    kept = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=kept)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, source],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (
        (ROOT / "portable_gdn", "portable_gdn"),
        (ROOT / "tpu", "portable_gdn/tpu"),
        (ROOT / "gpu", "portable_gdn/gpu"),
    ):
        for path in folder.rglob("*.py"):
            assert f"{inside}/{path.relative_to(folder).as_posix()}" in names
    assert "portable_gdn/py.typed" in names
    assert sum(name.endswith(".safetensors") for name in names) == 4
    assert not any(name.startswith(("tpu/", "gpu/", "tests/")) for name in names)
