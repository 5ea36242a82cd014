"""The command ``portable-gdn``. Exit codes: 0 holds, 1 a check failed, 2 the input is wrong, 130 interrupted.

All else is imported inside ``main``, so that an interruption while it is imported ends in a sentence, too.
"""

from __future__ import annotations

import sys
from typing import Any

from . import interruption

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from .app import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command line; errors of the caller become a sentence and exit code 2."""
    interruption.install()
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        interruption.over()
        sys.exit(130)
    except SystemExit as end:
        if end.code == 130 and not interruption.was_said(end):
            interruption.over()
        raise


def _run() -> int:
    from . import platforms

    platforms.settle()
    from ..spec.errors import GdnError
    from .app import app

    try:
        app(prog_name="portable-gdn")
    except GdnError as error:
        print(f"portable-gdn: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"portable-gdn: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    main()
