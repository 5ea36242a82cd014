"""The one exception type of this package, and the form of its sentences."""

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
    """An input that cannot be computed, a backend that cannot run, a file that cannot be read.

    The message is a sentence for the person who made the call: it names the argument, says what it was
    and what it must be.
    """


class UnknownKeyword(GdnError, TypeError):
    """A keyword that a function does not take. It is a TypeError, too, as Python's own would be."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest of the known names, or nothing where none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a function does not take.

    Raises:
        UnknownKeyword: names it, and the closest of the known ones, or all of them where none is close.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; its keywords are {', '.join(known)}."
            raise UnknownKeyword(f"{name} is no keyword of {function}{hint}")


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which answers a misspelt keyword with the one that was probably meant."""
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
    """A class whose constructor answers so."""
    cls.__init__ = suggests_keywords(cls.__init__)  # type: ignore[method-assign]
    return cls


def bad(argument: str, was: object, must: str) -> GdnError:
    """Build the error ``<argument> is <was>; it must be <must>.``

    Args:
        argument: name of the argument, as the caller typed it.
        was: what was given (a shape, a dtype, a value).
        must: what it must be, to follow the words "it must".
    """
    return GdnError(f"{argument} is {was}; it must {must}.")
