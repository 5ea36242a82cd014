"""The figures of our kernels on file: that they still hold, and that pages show them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def bench():
    yield from loaded("tpu_schedule")


@pytest.fixture(scope="module")
def layers():
    yield from loaded("tpu_layer")


def test_the_file_holds_every_call(bench):
    _, figures = bench.on_file()
    assert list(figures) == sorted(entry.name for entry in bench.ENTRIES)
    assert all(set(row) == set(bench.CHIPS) for row in figures.values())


def test_pages_show_the_file(bench):
    made_with, figures = bench.on_file()
    text = bench.PAGE.read_text()
    assert bench.MARKS[0] in text
    assert bench.replaced(text, bench.table(figures, made_with)) == text


def test_pages_show_the_layers_on_file(layers):
    held = json.loads(layers.FILE.read_text())
    assert set(held["figures"]) <= {layers.name(entry) for entry in layers.ENTRIES}
    for page, short in layers.PAGES:
        text = page.read_text()
        assert layers.MARKS[0] in text
        made = (layers.short_table if short else layers.table)(held["figures"], held["made with"])
        assert layers.with_table(text, made) == text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chip"), [("gdn fused default B=1 T=8192 16/32", "v6e"), ("16/16 64x64", "v5e")])
def test_cycles_have_not_grown(bench, name, chip):
    if any(importlib.util.find_spec(module) is None for module in ("jax", "libtpu", "flatbuffers")):
        pytest.skip("no compiler for TPUs; `pip install 'portable-gdn[tpu]'` brings it")
    made_with, figures = bench.on_file()
    if bench.versions() != made_with:
        pytest.skip(f"figures on file are of {made_with}, and here is {bench.versions()}: another compiler")
    entry = next(e for e in bench.ENTRIES if name in e.name)
    now = bench.measure(entry, (chip,))[chip]
    assert isinstance(now, dict), now
    before = figures[entry.name][chip]
    assert now["cycles"] <= bench.MOST * before["cycles"]
