"""Reports on disk, by what was compiled, for what and with what. A cache that fails is no error."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .report import Schedule

__all__ = ["ENVIRONMENT", "folder", "key", "load", "store"]

#: Where the cache lies, if not in the user's cache folder; "0" keeps none.
ENVIRONMENT = "PORTABLE_GDN_CACHE"


def folder() -> Path | None:
    """The folder of the cache, which need not be there; None where none is to be kept."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen == "0":
        return None
    if chosen:
        return Path(chosen) / "schedules"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "portable-gdn" / "schedules"


@cache
def _code() -> bytes:
    """A hash of the code that reads the compiler's files: a change there makes other reports."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "chips.json"]
    return b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)


def key(text: str, chip: str, grids: Mapping[str, Any], values: Any, versions: Mapping[str, str]) -> str:
    """The name under which a report is kept: a hash of the module's text and all else that it depends on."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    what = json.dumps([text, chip, grids, values, versions, flags], sort_keys=True).encode()
    return hashlib.sha256(_code() + what).hexdigest()


def load(name: str) -> Schedule | None:
    """The report of this key, or None; a damaged one counts as none."""
    where = folder()
    if where is None:
        return None
    try:
        return Schedule.from_json(json.loads((where / f"{name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(name: str, schedule: Schedule) -> None:
    """Keep a report, whole or not at all, if the disk lets us."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=where, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(schedule.to_json(), file)
            os.replace(part, where / f"{name}.json")
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
