"""Runs the Python blocks of a page one after the other, as one program; run by tests of pages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

page = (Path(__file__).parent.parent / "docs" / sys.argv[1]).read_text()
blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
scope: dict = {"__name__": "page"}
for name in sys.argv[2:]:  # NAME=VALUE: what the page's text is to have instead
    old, new = name.split("=>")
    assert any(old in block for block in blocks), old
    blocks = [block.replace(old, new) for block in blocks]
for number, block in enumerate(blocks):
    exec(compile(block, f"{sys.argv[1]}, block {number + 1}", "exec"), scope)
print(json.dumps({"blocks": len(blocks)}))
