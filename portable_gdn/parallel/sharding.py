"""The public description of how a call is split over a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..spec.errors import GdnError, bad, suggesting

__all__ = ["ROLES", "Sharding"]

#: What the axes of a mesh can split.
ROLES = ("batch", "heads", "sequence")


@suggesting
@dataclass(frozen=True)
class Sharding:
    """The axes of a mesh that split the rows, the heads and the tokens of a call.

    Each is the name of an axis, a tuple of names (the outermost first), or None for no split. Axes of size 1 split
    nothing, so the same code works on any mesh that has these axes.

    Args:
        batch: Splits the rows B, and their states.
        heads: Splits the value heads HV, and the key heads H if their number is divisible too. If it is not, every
            device holds all of q and k and selects the key heads of its value heads.
        sequence: Splits the tokens T (context parallelism).
        mesh: A ``jax.sharding.Mesh``; None means the current one (``jax.set_mesh``), or else that of the arrays.
    """

    batch: str | tuple[str, ...] | None = None
    heads: str | tuple[str, ...] | None = None
    sequence: str | tuple[str, ...] | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for role in ROLES:
            given = getattr(self, role)
            names = (given,) if isinstance(given, str) else given
            if names is not None and not (isinstance(names, tuple) and all(isinstance(n, str) for n in names)):
                raise bad(
                    f"sharding.{role}", repr(given), "be None, the name of an axis of the mesh or a tuple of them"
                )
            for name in names or ():
                if name in seen:
                    raise GdnError(
                        f"sharding.{role} names the axis {name!r}, which sharding.{seen[name]} names already; an axis "
                        "of the mesh can split one thing."
                    )
                seen[name] = role

    def axes(self, role: str) -> tuple[str, ...]:
        """Return the names of the axes that split "batch", "heads" or "sequence"."""
        given = getattr(self, role)
        return (given,) if isinstance(given, str) else given or ()
