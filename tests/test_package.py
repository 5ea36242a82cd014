"""The package as it is shipped: what the wheel holds, which way imports point, that files can be read back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
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
        [sys.executable, "-m", "build", "--no-isolation", "-o", tmp_path, source],  # the wheel is built from the sdist
        check=True,
        capture_output=True,
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "mkdocs.yml",
        "docs/index.md",
        "docs/images/house.svg",
        "examples/two_machines.ipynb",
        "tests/conftest.py",
        "benchmarks/tpu_schedule.json",
        "portable_gdn/tpu/chips.json",
    ):
        assert name in inside, name
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

    # It works elsewhere, without the repository.
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere = {**os.environ, "PYTHONPATH": str(site)}
    for words in (
        ["-c", "import portable_gdn.gpu, portable_gdn.tpu; print(portable_gdn.tpu.__file__)"],
        ["-m", "portable_gdn.cli.main", "verify", "-b", "numpy", "-b", "xla", "--case", "a chunk"],
    ):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=elsewhere, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert str(site) in done.stdout or "holds:" in done.stdout


def brings(extras, name, seen=()):
    """Names of the distributions that an extra installs, those of the extras that it names included."""
    found = set()
    for requirement in extras[name]:
        package, _, more = re.match(r"([\w.-]+)(\[([\w,-]+)\])?", requirement).groups()
        found.add(package.lower())
        for other in (more or "").split(","):
            if package == "portable-gdn" and other and other not in seen:
                found |= brings(extras, other, (*seen, name))
            elif other == "tpu":
                found.add("libtpu")
    return found


def test_every_hint_how_to_install_names_an_extra_that_exists_and_brings_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [
        path for folder in ("portable_gdn", "gpu", "tpu", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    hints = 0
    for path in (*sources, *pages):
        text = path.read_text()
        for named in re.findall(r"portable-gdn\\*\[([^\]\n{]+)\]", text):
            for extra in named.split(","):
                assert extra.strip() in extras, f"{path.relative_to(ROOT)} names {extra!r}"
                hints += 1
        for package, extra in re.findall(r"\b(\w+) is not installed[^`\n]*`pip install 'portable-gdn\[(\w+)\]'", text):
            assert package in brings(extras, extra), f"{path.relative_to(ROOT)}: {extra!r} does not bring {package}"
    assert hints >= 8
