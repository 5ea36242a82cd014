"""Suites: named lists of cases that two machines can agree on. A change of one is a new version of all."""

from __future__ import annotations

from ..spec.errors import bad
from .cases import Case, cases_named, designed, pairwise, recorded

__all__ = ["READABLE", "SUITES", "SUITE_VERSION", "suite"]

SUITE_VERSION = "3"
#: Versions whose recordings are read: their recipes are in the file, and inputs are held against its hashes.
READABLE = ("1", "2", "3")

_QUICK = (
    "one token", "a chunk and a token", "KDA", "DeltaNet", "bfloat16, 64 x 96", "gates one -inf", "packed with empties",
    "left padding",
)  # fmt: skip


def _quick() -> list[Case]:
    return cases_named(_QUICK)


def _standard() -> list[Case]:
    return [*designed(), *recorded()]


def _full() -> list[Case]:
    """With the pairwise plan, and sequences long enough to show an error that grows with every token."""
    long = [
        Case(f"4096 tokens, {variant}, {dtype}", variant, 4096, dtype, H=1, HV=2, K=64, V=64, seed=7)
        for variant, dtype in (("GDN", "bfloat16"), ("KDA", "float32"))
    ]
    return [*_standard(), *pairwise(), *long]


SUITES = {"quick": _quick, "standard": _standard, "full": _full}


def suite(name: str) -> list[Case]:
    """The cases of a suite.

    Raises:
        GdnError: there is none of that name.
    """
    if name not in SUITES:
        raise bad("--suite", repr(name), f"be one of {', '.join(SUITES)}")
    return SUITES[name]()
