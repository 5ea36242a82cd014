"""The exception type of this package, and helpers that write its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

__all__ = ["GdnError", "UnknownKeyword", "bad", "check_keywords", "did_you_mean", "suggesting", "suggests_keywords"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


class GdnError(ValueError):
    """Raised for an input that cannot be computed, a backend that cannot run, or a file that cannot be read.

    The message is a whole sentence that names the argument and says what it is and what it must be.
    """


class UnknownKeyword(GdnError, TypeError):
    """Raised for a keyword that a function does not take. It is also a TypeError, as Python itself raises."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` with the closest of the known names, or "" if none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a function does not take.

    Raises:
        UnknownKeyword: a keyword is unknown. The message suggests the closest known one, or lists all if none is close.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; its keywords are {', '.join(known)}."
            raise UnknownKeyword(f"{name} is no keyword of {function}{hint}")


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that the error for a misspelt keyword suggests the one that was probably meant."""
    known = tuple(name for name in signature(function).parameters if name != "self")
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in known:
                check_keywords(name, kwargs, known)
        return function(*args, **kwargs)

    return checked


def suggesting(cls: type[C]) -> type[C]:
    """Decorate a class so that its constructor suggests the right keyword for a misspelt one."""
    cls.__init__ = suggests_keywords(cls.__init__)  # type: ignore[method-assign]
    return cls


def bad(argument: str, was: object, must: str) -> GdnError:
    """Build the error ``<argument> is <was>; it must be <must>.``

    Args:
        argument: name of the argument, as the caller typed it.
        was: the shape, dtype or value that was given.
        must: the requirement, as it continues the words "it must".
    """
    return GdnError(f"{argument} is {was}; it must {must}.")
