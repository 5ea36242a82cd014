"""Docstrings and pages are whole sentences: what begins in the middle of one is a riddle to whoever reads only that."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("portable_gdn", "gpu", "tpu") for path in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Beginnings that lean on a sentence that is not there.
RIDDLE = re.compile(
    r"Of\b(?! course)|The same(?=[:,.]| of | for | by | in | as | from | with | without )|Likewise\b|Ditto\b"
)


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.lineno, item.value.value.strip()


def sentences(path):
    """The sentences of a page's paragraphs, without code and tables."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    paragraphs = (p for p in text.split("\n\n") if not p.lstrip().startswith(("|", "    ", "#")))
    for paragraph in paragraphs:
        yield from re.split(r"(?<=[.!?]) +", re.sub(r"\s+", " ", paragraph.strip().lstrip("-* ")))


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    lines = ((path, line, text) for path in FILES for line, text in docstrings(path) if RIDDLE.match(text))
    found = [f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}" for path, line, text in lines]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_of_a_page_leans_on_nothing(page):
    found = [sentence for sentence in sentences(page) if RIDDLE.match(sentence)]
    assert not found, "\n".join(found)
