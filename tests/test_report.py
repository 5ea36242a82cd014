"""The page: what it says, that it needs no network, and that a browser shows and sorts it."""

from __future__ import annotations

import html
import re
import shutil
import subprocess

import numpy as np
import pytest
from test_bisect import PLANTED, ByStages
from typer.testing import CliRunner

import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.cli.main import app
from portable_gdn.harness.cases import Case
from portable_gdn.harness.compare import compare
from portable_gdn.harness.compute import Settings, backend_for
from portable_gdn.harness.record import record
from portable_gdn.harness.report import charts
from portable_gdn.harness.report.page import page
from portable_gdn.harness.run_file import RunFile

CASES = [Case("GDN <b>", T=130, HV=4), Case("KDA", variant="KDA", T=65), Case("step", layout="step", T=1, B=3)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """By verdict, a comparison and its page."""
    path = tmp_path_factory.mktemp("report") / "run.safetensors"
    settings = Settings(stages=True)
    record(path, backend_for("numpy", settings), "standard", CASES, settings)
    found = {}
    for name, replaced in (("equal", {}), ("differs", PLANTED["delta"][0])):
        pg.register_backend(ByStages(**replaced))
        comparison = compare(RunFile(path), dispatch.get("under test"), Settings())
        found[name] = (comparison, page(comparison))
    dispatch.unregister_backend("under test")
    return found


def test_the_page_says_the_verdict_and_all_results(pages):
    for name, words in (("equal", "Equal"), ("differs", "Not equal")):
        comparison, text = pages[name]
        assert f"<title>{words}:" in text
        assert html.escape(comparison.sentence(), quote=False).replace("'", "&#39;") in text
        assert text.count("<tr class=") + text.count('<tr class="">') >= sum(len(c.tensors) for c in comparison.cases)
        for case in comparison.cases:
            assert html.escape(case.case) in text
        assert "<b>GDN <b></b>" not in text  # names are escaped
    assert "first at stage delta" in pages["differs"][1]
    assert "Where they part" not in pages["equal"][1]


def test_the_page_needs_no_network_and_knows_light_and_dark(pages):
    for _, text in pages.values():
        assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", text)
        assert "prefers-color-scheme: dark" in text
        assert text.count("<svg") >= 8


def test_the_command_writes_the_page(tmp_path):
    settings = Settings()
    path, out = tmp_path / "x.safetensors", tmp_path / "out.html"
    record(path, backend_for("numpy", settings), "quick", [CASES[2]], settings)
    found = CliRunner().invoke(app, ["compare", str(path), "-b", "numpy", "--report", str(out)])
    assert found.exit_code == 0, found.output
    assert "<title>Equal: numpy (recorded), numpy (here)</title>" in out.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"x.safetensors", "out.html"}


def test_charts_survive_what_is_not_finite():
    table = [[np.nan, 0.0], [np.inf, 1e-3]]
    assert "token 1, head 1: 1.0e-03" in charts.error_map(table, 2, (1e-6, 1e-3), 0)
    assert charts.bars([[0.0, np.inf], [0.0, 0.0]], ("a", "b"), "head").count("<rect") == 4
    assert "beyond" in charts.stage_chart({"a": {"output": (np.nan, 1e-3)}}, ("output",))
    assert "nan" not in charts.stage_chart({"a": {"output": (0.0, 0.0)}}, ("output",))  # no error, none allowed


BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is here")
def test_a_browser_sorts_the_table(pages, tmp_path):
    path = tmp_path / "page.html"
    click = "<script>document.querySelectorAll('#results th')[9].click()</script></body>"
    path.write_text(pages["differs"][1].replace("</body>", click))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    used = [float(row.split('"')[0]) for row in re.findall(r'<td data-v="([^>]*)><span class="used">', shown)]
    assert len(used) > 10
    assert used == sorted(used, reverse=True)
    assert f"{len(used)} of {len(used)} results" in shown
