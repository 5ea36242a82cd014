"""How much two sound computations may differ, in float32."""

from __future__ import annotations

__all__ = ["LIMIT", "LOGITS_LIMIT"]

LIMIT = 1e-5
"""Relative error up to which a layer agrees at least; sound ones stay ten times below."""
LOGITS_LIMIT = 1e-4
"""Relative error up to which logits agree where our mixers stand in the original's model: the layers' errors add up."""
