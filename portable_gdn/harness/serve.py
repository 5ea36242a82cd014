"""The child's side of ``worker.py``: cases in on standard input, one JSON object a case out."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

from .cases import Case
from .verify import verify

__all__: list[str] = []


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.read())
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)  # cases are small, and another process is at work beside this one
    for recipe in order["cases"]:
        case = Case(**recipe)
        report = verify([order["backend"]], full=order["full"], cases=[case], in_process=True)
        found = report.as_dict()
        answer = {
            "case": case.name, "rows": found["results"], "not_run": found["not_run"], "seconds": found["seconds"],
        }  # fmt: skip
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
