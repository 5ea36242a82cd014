"""The proof of a port: bytes, and the original implementation against ours. ``check`` is what a user calls."""

from __future__ import annotations

from .prove import Finding, Report, check

__all__ = ["Finding", "Report", "check"]
