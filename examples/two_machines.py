"""The proof between two machines, on one: record a backend, replay another, and see where they part.

python examples/two_machines.py                                   # torch beside xla, on a CPU
python examples/two_machines.py --first fla --second torch        # on a machine with a GPU
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*words: str) -> int:
    """A command of portable-gdn, as one would type it; its exit code."""
    print("$ portable-gdn", *words, flush=True)
    return subprocess.run([sys.executable, "-m", "portable_gdn.cli.main", *words], check=False).returncode


def main() -> None:
    """Record, compare, and show a fault that is put in on purpose: another machine's rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", default="torch", help="backend of the machine that records")
    parser.add_argument("--second", default="xla", help="backend of the machine that compares")
    parser.add_argument("--report", type=Path, help="write the page of the comparison here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        recording = str(Path(room) / "first.safetensors")
        run("record", "-b", options.first, "--suite", "quick", "--stages", "-o", recording)
        page = ["--report", str(options.report)] if options.report else []
        equal = run("compare", recording, "-b", options.second, *page)
        print("equal within what both declare" if equal == 0 else "not equal")
        parts = run("bisect", recording, "-b", options.second, "--emulate", "fast", "--case", "a chunk")
        print("with a TPU's rounding on one side they part, as shown" if parts == 1 else "they do not part")


if __name__ == "__main__":
    main()
