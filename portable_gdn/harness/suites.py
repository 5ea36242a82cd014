"""Suites are named lists of cases that two machines can both run. Any change to one is a new version of all."""

from __future__ import annotations

from ..spec.errors import bad
from .cases import Case, cases_named, designed, pairwise, recorded

__all__ = ["READABLE", "SUITES", "SUITE_VERSION", "suite"]

SUITE_VERSION = "3"
#: Versions whose recordings can be read: the file has their recipes, and hashes to compare the inputs with.
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
    """Return the full suite, with the pairwise plan and sequences long enough to show errors that grow per token."""
    long = [
        Case(f"4096 tokens, {variant}, {dtype}", variant, 4096, dtype, H=1, HV=2, K=64, V=64, seed=7)
        for variant, dtype in (("GDN", "bfloat16"), ("KDA", "float32"))
    ]
    return [*_standard(), *pairwise(), *long]


SUITES = {"quick": _quick, "standard": _standard, "full": _full}


def suite(name: str) -> list[Case]:
    """Return the cases of a suite.

    Raises:
        GdnError: there is no suite of that name.
    """
    if name not in SUITES:
        raise bad("--suite", repr(name), f"be one of {', '.join(SUITES)}")
    return SUITES[name]()
