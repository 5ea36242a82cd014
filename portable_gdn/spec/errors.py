"""The one exception type of this package, and the form of its sentences."""

from __future__ import annotations

__all__ = ["GdnError", "bad"]


class GdnError(ValueError):
    """An input that cannot be computed, a backend that cannot run, a file that cannot be read.

    The message is a sentence for the person who made the call: it names the argument, says what it was
    and what it must be.
    """


def bad(argument: str, was: object, must: str) -> GdnError:
    """Build the error ``<argument> is <was>; it must be <must>.``

    Args:
        argument: name of the argument, as the caller typed it.
        was: what was given (a shape, a dtype, a value).
        must: what it must be, to follow the words "it must".
    """
    return GdnError(f"{argument} is {was}; it must {must}.")
