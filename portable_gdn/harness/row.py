"""One row of the proof's report: a judged tensor of one case on one backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Row"]


class Row(NamedTuple):
    """One row of the report: a tensor of a case on a backend.

    If a tensor with tokens fails, ``token`` is the first token of its sequence that exceeds the budget (for a gradient
    the last one, where its fault begins), and ``token_head`` is a head in which it does.
    """

    backend: str
    case: str
    tensor: str
    error: float
    expected: float
    budget: float
    ok: bool
    judged: bool
    head: int
    note: str = ""
    token: int | None = None
    token_head: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary for JSON, in which figures that are not finite are strings."""
        row = self._asdict()
        for name in ("error", "expected", "budget"):
            if not np.isfinite(row[name]):
                row[name] = str(row[name])
        return row
