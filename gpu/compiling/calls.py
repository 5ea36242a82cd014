"""Reports of the kernels that calls of the rule would launch, by a child process for each architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...spec.errors import GdnError
from ...spec.problem import Options
from .. import interpreter
from ..versions import missing, versions
from .report import CompileReport, KernelReport
from .targets import target_named

__all__ = ["Call", "compile_calls"]


class Call(NamedTuple):
    """A call described by the shapes and dtypes of its operands; ``backward`` adds its gradient."""

    name: str
    operands: Mapping[str, tuple[Sequence[int], str]]
    options: Options
    backward: bool = False


def compile_calls(
    calls: Sequence[Call],
    arch: str,
    *,
    all_configs: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CompileReport:
    """Compile every kernel of FLA that these calls would launch, for ``arch``, without a GPU.

    Args:
        calls: the calls.
        arch: the architecture, one of ``portable_gdn.gpu.TARGETS``.
        all_configs: whether to compile all configurations of autotuned kernels, not only the first.
        progress: called with the name of each kernel that is compiled.

    Raises:
        GdnError: a package is missing, the architecture is unknown, or the compiling process ends early.
    """
    target_named(arch)
    why = missing()
    if why is not None:
        raise GdnError(why)
    order = {
        "arch": arch,
        "all_configs": all_configs,
        "calls": [
            {
                "name": call.name,
                "operands": {name: [list(shape), dtype] for name, (shape, dtype) in call.operands.items()},
                "options": {name: value for name, value in call.options._asdict().items() if name != "gate"},
                "gate": None if call.options.gate is None else list(call.options.gate),
                "backward": call.backward,
            }
            for call in calls
        ],
    }
    kernels = []
    for answer in _ask(order):
        answer.pop("launches")
        kernel = KernelReport(**answer)
        kernels.append(kernel)
        if progress is not None:
            progress(kernel.name)
    return CompileReport(arch, tuple(kernels), versions())


def _ask(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the child's answers as they come; the child ends when this generator is closed."""
    environment = {**os.environ, interpreter.VARIABLE: "0"}
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache  # kernels in the user's own cache may come from other compilers
        process = subprocess.Popen(
            [sys.executable, "-m", "portable_gdn.gpu.compiling.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(order))
                process.stdin.close()
            except OSError:
                pass  # the child has ended; that is handled below
            done = False
            for line in process.stdout:
                answer = json.loads(line)
                if "done" in answer:
                    done = True
                else:
                    yield answer
            code = process.wait()
            if not done:
                errors.seek(0)
                lines = [x.strip() for x in errors.read().decode(errors="replace").splitlines() if x.strip()]
                raise GdnError(
                    f"the process that compiles for {order['arch']} ended with exit code {code}: "
                    f"{lines[-1] if lines else 'it said nothing'}"
                )
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
