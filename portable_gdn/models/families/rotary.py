"""How a family's configuration says what positions do to queries and keys."""

from __future__ import annotations

from typing import Any

from ...spec.errors import bad
from .source import Source

__all__ = ["rotary"]


def rotary(source: Source, dim: int, part: float, theta: float | None = None) -> tuple[int, float]:
    """How many channels of a head are turned, and the base of their frequencies, where old and new files have them.

    Args:
        source: whose configuration is read.
        dim: of a head.
        part: of a head that is turned where the configuration does not say.
        theta: the base where it does not say; None is that it must.

    Raises:
        GdnError: positions are scaled, which is not computed here, or one of the two is no number that fits.
    """
    text = source.text
    said: dict[str, Any] = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "mrope"):  # of text alone, the three positions of mrope are one
        raise bad(
            "config.json's rope_type", repr(kind), "be 'default': positions that are scaled are not computed here"
        )
    theta = source.number("rope_theta", said.get("rope_theta", theta))
    part = source.number("partial_rotary_factor", said.get("partial_rotary_factor", part))
    channels = int(dim * part)
    if channels % 2 or not 0 < channels <= dim:
        raise bad("config.json's partial_rotary_factor", part, f"make an even part of {dim}")
    return channels, theta
