"""The child process of ``worker.py``: it reads cases on standard input, and writes one JSON object per case."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .cases import Case, build
from .compute import one_thread, serve_run
from .devices import register_split
from .run_file import RunFile
from .verify import verify

__all__: list[str] = []


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.read())
    one_thread()  # cases are small, and other processes run at the same time
    for answer in _verified(order) if order["task"] == "verify" else _run(order):
        print(json.dumps(answer), file=answers, flush=True)


def _verified(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "devices" in order:
        register_split(order["split"], order["devices"])
    for recipe in order["cases"]:
        case = Case(**recipe)
        report = verify([order["backend"]], full=order["full"], cases=[case], in_process=True)
        found = report.as_dict()
        yield {
            "case": case.name, "rows": found["results"], "not_run": found["not_run"], "seconds": found["seconds"],
        }  # fmt: skip


def _run(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if order["recording"] is None:
        return serve_run(order, build)
    return serve_run(order, RunFile(Path(order["recording"])).inputs)


if __name__ == "__main__":
    _serve()
