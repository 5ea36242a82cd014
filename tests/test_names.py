"""Scripts, examples and tests name only what modules of this project have: many of them run seldom, some never here."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EXHAUSTIVE

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "examples", "tests")
WRONG = {"nothing", "gated_delta_rul"}  # names that tests get wrong on purpose
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def trees(path: Path) -> Iterator[ast.Module]:
    """Yield the file's syntax tree, and those of the programs that it holds as strings for other processes."""
    whole = ast.parse(path.read_text())
    yield whole
    for node in ast.walk(whole):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            try:
                yield ast.parse(node.value)
            except SyntaxError:  # prose, or a program with names to be filled in
                continue


def is_ours(name: str | None) -> bool:
    return name is not None and (name.split(".")[0] == "portable_gdn" or name in SCRIPTS)


def named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each of our modules that the program imports, with each name that it takes from it."""
    known: dict[str, set[str]] = {}  # a name may stand for one module in one function and for another in the next
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and is_ours(node.module):
            for name in node.names:
                yield node.module, name.name
                known.setdefault(name.asname or name.name, set()).add(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Import):
            for name in node.names:
                if is_ours(name.name) and (name.asname or "." not in name.name):
                    known.setdefault(name.asname or name.name, set()).add(name.name)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and len(known.get(node.value.id, ())) == 1
        ):
            yield next(iter(known[node.value.id])), node.attr


def has(module: str, name: str) -> bool | None:
    """Whether the module has this; None for what is no module, or for one whose libraries are not installed."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    if hasattr(found, name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return None if error.name != f"{module}.{name}" else False
    return True


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_named_exists(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    paths = sorted((ROOT / folder).glob("*.py"))
    asked = {(module, name, path.name) for path in paths for tree in trees(path) for module, name in named(tree)}
    missing = [
        f"{path}: {module}.{name}"
        for module, name, path in sorted(asked)
        if name not in WRONG and has(module, name) is False
    ]
    assert asked
    assert not missing, "\n".join(missing)


def test_exhaustive_tests_exist():
    for line in EXHAUSTIVE:
        file, _, function = line.partition("::")
        functions = {node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body if hasattr(node, "name")}
        assert function.partition("[")[0] in functions, line


def test_a_missing_name_is_found(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    tree = ast.parse("import tpu_memory as m\nfrom portable_gdn import door\nm.nothing()\ndoor.nothing\n")
    assert sorted(pair for pair in named(tree) if has(*pair) is False) == [
        ("portable_gdn.door", "nothing"),
        ("tpu_memory", "nothing"),
    ]
