"""The compiler's half, in a process of its own: compile a serialised module for a chip, and read what was written.

    python -m portable_gdn.tpu.scheduling.child FOLDER

FOLDER holds ``request.json`` and ``module.bin``; ``schedule.json`` is written there, or ``error.txt`` with the
compiler's words.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from ..chips import chip_named
from .analyse import analyse
from .compile import compile_for, compile_on, environment, slice_for
from .dump import flags

__all__ = ["main"]


def main(folder: Path) -> int:
    """Compile and analyse; the exit code is 3 if the compiler refuses."""
    request = json.loads((folder / "request.json").read_text())
    chip = chip_named(request["chip"])
    dump = folder / "dump"
    dump.mkdir()
    environment(os.environ)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), flags(str(dump))]).strip()
    from jax import export

    exported = export.deserialize(bytearray((folder / "module.bin").read_bytes()))
    try:
        if request["mesh"]:
            compiled = compile_on(chip, dict(request["mesh"]), exported)
        else:
            compiled = compile_for(chip, exported.call, *_arguments(exported), donated=request["donated"])
    except Exception as error:
        (folder / "error.txt").write_text(str(error))
        return 3
    memory = compiled.memory_analysis()
    schedule = analyse(
        dump,
        chip,
        request["grids"],
        {int(number): np.array(values) for number, values in request["values"].items()},
        {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "donated": memory.alias_size_in_bytes,
        },
        request["versions"],
        compiled.as_text(),
        slice_for(chip, dict(request["mesh"])) if request["mesh"] else None,
    )
    (folder / "schedule.json").write_text(json.dumps(schedule.to_json()))
    return 0


def _arguments(exported: object) -> list[object]:
    import jax

    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
