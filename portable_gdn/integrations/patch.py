"""Functions of other libraries replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Patch"]


class Patch:
    """What ``patch_transformers``, ``patch_maxtext`` or ``patch_torchax`` replaced; ``undo`` puts it back, and so does
    the end of a ``with`` block."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._added: list[tuple[dict[Any, Any], Any, Any]] = []

    def _replace(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(module, name)
        after = make(before)
        setattr(module, name, after)
        self._replaced.append((module, name, before, after))

    def _put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """An entry of a table that has none of this key; one that it has is left."""
        if table.setdefault(key, value) is value:
            self._added.append((table, key, value))

    def undo(self) -> None:
        """Put back what was there, unless somebody else has replaced it meanwhile; may be called twice."""
        while self._replaced:
            module, name, before, after = self._replaced.pop()
            if getattr(module, name) is after:
                setattr(module, name, before)
        while self._added:
            table, key, value = self._added.pop()
            if table.get(key) is value:
                del table[key]

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
