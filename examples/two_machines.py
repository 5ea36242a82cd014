"""The proof between two machines, on one: record a backend, replay another, and see where they part.

python examples/two_machines.py                                   # torch beside xla, on a CPU
python examples/two_machines.py --first fla --second torch        # on a machine with a GPU
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.cli.app import app
from portable_gdn.spec.problem import Problem, Result


class Slipped(pg.Backend):
    """The oracle with a fault: the output of token 50, head 1, is 1 % too large."""

    name = "slipped"
    libraries = ("numpy",)

    def run(self, problem: Problem) -> Result:
        result = dispatch.get("numpy").run(problem)
        if problem.signature.T > 50:
            result.o[0, 50, 1] *= 1.01
        return result

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        _, found = dispatch.get("numpy").gradients(problem, cotangents)
        return self.run(problem), found


def run(*words: str) -> int:
    """A command of portable-gdn, as one would type it; its exit code."""
    print("$ portable-gdn", *words, flush=True)
    try:
        app(list(words), prog_name="portable-gdn")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> None:
    """Record, compare, and find a fault that is put in on purpose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", default="torch", help="backend of the machine that records")
    parser.add_argument("--second", default="xla", help="backend of the machine that compares")
    parser.add_argument("--report", type=Path, help="write the page of the comparison here")
    parser.add_argument(
        "--all",
        dest="case",
        action="store_const",
        const=(),
        default=("--case", "a chunk"),
        help="all cases of the suite, not only one",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        recording = str(Path(room) / "first.safetensors")
        run("record", "-b", options.first, "--suite", "quick", *options.case, "--stages", "-o", recording)
        page = ["--report", str(options.report)] if options.report else []
        equal = run("compare", recording, "-b", options.second, *page)
        print("equal within what both declare" if equal == 0 else "not equal")
        pg.register_backend(Slipped())
        parts = run("bisect", recording, "-b", "slipped", "--case", "a chunk")
        print("the fault is found, as shown" if parts == 1 else "the fault is not found")


if __name__ == "__main__":
    main()
