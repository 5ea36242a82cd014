"""The command ``portable-gdn``.

Exit codes are 0 for success, 1 if a check failed, 2 if the input is wrong and 130 after an interruption.
Everything else is imported inside ``main``, so that an interruption during an import also ends in a plain sentence.
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
    """Run the command line; wrong input becomes a sentence on standard error and exit code 2."""
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
