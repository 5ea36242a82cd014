"""Fills the page of commands with their help texts when the site is built, so that it cannot differ from them."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark on a page by every command's usage, arguments and options, as typer writes them."""
    if MARK not in markdown:
        return markdown
    command = [sys.executable, "-m", "typer", "portable_gdn.cli.app", "utils", "docs", "--name", "portable-gdn"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"^# `portable-gdn`$.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "## `portable-gdn verify`" in text
    return markdown.replace(MARK, text)
