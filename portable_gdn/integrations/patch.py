"""Functions of other libraries replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Patch"]


class Patch:
    """What ``patch_transformers`` or ``patch_maxtext`` replaced; ``undo`` puts it back, and so does the end of a
    ``with`` block."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def _replace(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(module, name)
        after = make(before)
        setattr(module, name, after)
        self._replaced.append((module, name, before, after))

    def undo(self) -> None:
        """Put back what was there, unless somebody else has replaced it meanwhile; may be called twice."""
        while self._replaced:
            module, name, before, after = self._replaced.pop()
            if getattr(module, name) is after:
                setattr(module, name, before)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
