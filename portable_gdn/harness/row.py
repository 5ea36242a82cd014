"""One judged tensor of one case on one backend: a line of the proof's report."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Row"]


class Row(NamedTuple):
    """One line of the report: a tensor of a case on a backend.

    token, token_head: of a tensor with tokens that fails, the first token that is beyond its budget (of a gradient the
    last, where its fault begins), in its sequence, and a head in which it is.
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
        """For JSON: figures that are not finite become strings."""
        row = self._asdict()
        for name in ("error", "expected", "budget"):
            if not np.isfinite(row[name]):
                row[name] = str(row[name])
        return row
