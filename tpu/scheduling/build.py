"""``schedule``: report how a function of JAX arrays will run on a TPU, by the TPU's own compiler running on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ...spec.errors import GdnError, bad
from ..chips import CHIPS, chip_named
from . import cache
from .compile import environment
from .interrupts import interruptible
from .lower import Call, Lowered, lower
from .report import Schedule

__all__ = ["expected_wait", "missing", "schedule", "schedules"]


def missing() -> str | None:
    """Return a sentence that says why nothing can be compiled for a TPU here, or None."""
    for module, extra in (("jax", "jax"), ("libtpu", "the TPU's compiler"), ("flatbuffers", "jax.export's format")):
        if importlib.util.find_spec(module) is None:
            return (
                f"{module} is not installed ({extra}); `pip install 'portable-gdn[tpu]'` brings what compiling for a "
                "TPU needs, on a machine without one too."
            )
    return None


#: The compiler's version in which writing a listing for a v7x took time in proportion to its length.
PROMPT = (0, 0, 50)


def expected_wait(chips: Sequence[str]) -> str | None:
    """Return a sentence about the wait if compiling for these chips takes long, or None.

    To write listings, libtpu packs the bundles several more times. For a v7x, version 0.0.42 then searches the earlier
    bundles at each instruction: 130 s for a kernel that compiles in 14 s; version 0.0.50 takes 6 s.
    """
    version = metadata.version("libtpu") if importlib.util.find_spec("libtpu") is not None else ""
    if "v7x" not in chips or tuple(int(n) for n in re.findall(r"\d+", version)[:3]) >= PROMPT:
        return None
    slow = f"libtpu {version} takes minutes to write the listing of a large kernel for v7x"
    return f"{slow}; 0.0.50 (jax 0.12) takes seconds."


def schedule(
    function: Callable[..., Any], *args: Any, chip: str = "v6e", use_cache: bool = True, timeout: float = 600.0
) -> Schedule:
    """Compile a function for a TPU, without one, and report the compiler's schedule.

    Args:
        function: A function of JAX arrays, jitted or not, with or without Pallas kernels. It is traced in this process.
            Arguments that ``jax.jit`` was told to donate are donated.
        args: A ``jax.ShapeDtypeStruct``, an array, or a tree of them for each of its arguments. Only the shapes of
            arrays matter, except for integers: if a kernel reads an argument as scalars (``PrefetchScalarGridSpec``)
            and its control flow depends on them, their values make the report exact. If shapes have a ``NamedSharding``
            on a mesh of several devices (``scheduling.compile.chip_mesh``), the program is compiled for a slice, and
            the report describes one device.
        chip: "v4", "v5e", "v5p", "v6e" or "v7x".
        use_cache: Whether to reuse a stored report and to store a new one, in the user's cache folder or the folder in
            PORTABLE_GDN_CACHE.
        timeout: The seconds that the compiler may take.

    Returns:
        The report; ``print`` it, or read its fields (cycles of each kernel, use of each unit, spills, memory traffic).

    Raises:
        GdnError: The chip is unknown, jax or libtpu is missing, the function cannot be lowered, the compiler refuses a
            kernel (its words are quoted), or it takes longer than ``timeout``.
    """
    (report,) = schedules(function, *args, chips=[chip], use_cache=use_cache, timeout=timeout)
    if isinstance(report, GdnError):
        raise report
    return report


def schedules(
    function: Callable[..., Any],
    *args: Any,
    chips: Sequence[str] = tuple(CHIPS),
    use_cache: bool = True,
    timeout: float = 600.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Schedule | GdnError]:
    """Do what ``schedule`` does for several chips, with their compilers in parallel.

    Args:
        function, args, use_cache, timeout: As in ``schedule``.
        chips: The names of the chips.
        progress: Called with a chip's name, the number of chips done, and their total.

    Returns:
        For each chip its report, or the error that ``schedule`` would raise if the compiler fails for this chip.
    """
    why = missing()
    if why is not None:
        raise GdnError(why)
    if timeout <= 0:
        raise bad("timeout", timeout, "be above 0")
    found: dict[str, Schedule | GdnError] = {}
    jobs: list[_Job] = []
    with ExitStack() as stack:
        stack.enter_context(interruptible())
        for name in dict.fromkeys(chips):
            lowered = lower(chip_named(name), function, args)
            job = _Job.of(name, lowered)
            known = cache.load(job.key) if use_cache else None
            if known is None:
                jobs.append(job)
            else:
                found[name] = known
        running: list[_Running] = []
        while jobs or running:
            while jobs and len(running) < max(1, os.cpu_count() or 1):
                running.append(stack.enter_context(_Running(jobs.pop(0), timeout)))
            for done in [r for r in running if r.ended()]:
                running.remove(done)
                found[done.job.chip] = report = done.result()
                if use_cache and isinstance(report, Schedule):
                    cache.store(done.job.key, report)
                if progress is not None:
                    progress(done.job.chip, len(found), len(set(chips)))
            time.sleep(0.02)
    return [found[name] for name in chips]


class _Job(NamedTuple):
    """A module to compile for a chip, and the key of its report."""

    chip: str
    lowered: Lowered
    request: dict[str, Any]
    key: str

    @classmethod
    def of(cls, chip: str, lowered: Lowered) -> _Job:
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
        grids: dict[str, list[list[int]]] = {}
        for call in lowered.calls:
            if call.grid is not None:
                grids.setdefault(call.name, []).append(list(call.grid))
        values = {str(number): a.tolist() for number, a in lowered.values.items()}
        donated = list(lowered.donated)
        request = {"chip": chip, "grids": grids, "values": values, "versions": versions, "donated": donated}
        request["mesh"] = lowered.mesh
        return cls(
            chip, lowered, request, cache.key(lowered.text, chip, grids, [values, donated, lowered.mesh], versions)
        )


class _Running:
    """A running compiler and its temporary folder, which is removed with it in any case."""

    def __init__(self, job: _Job, timeout: float) -> None:
        self.job = job
        self.timeout = timeout

    def __enter__(self) -> _Running:
        self.folder = Path(tempfile.mkdtemp(prefix="portable-gdn-"))
        try:
            (self.folder / "request.json").write_text(json.dumps(self.job.request))
            (self.folder / "module.bin").write_bytes(self.job.lowered.module)
            env = dict(os.environ)
            environment(env)
            env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)  # what was found here is found there
            self.output = (self.folder / "output").open("wb")
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "portable_gdn.tpu.scheduling.child", str(self.folder)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt reaches us, and we end it
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ended(self) -> bool:
        """Return whether the compiler has ended, or its time is over."""
        return self.process.poll() is not None or time.monotonic() - self.started > self.timeout

    def result(self) -> Schedule | GdnError:
        """Return the report of this program, or the error."""
        try:
            return self._result()
        finally:
            self.__exit__()

    def _result(self) -> Schedule | GdnError:
        code = self.process.poll()
        if code is None:
            return GdnError(f"the compiler for {self.job.chip} took longer than {self.timeout:.0f} s and was ended.")
        if code == 0:
            return Schedule.from_json(json.loads((self.folder / "schedule.json").read_text()))
        said = self.folder / ("error.txt" if code == 3 else "output")
        words = said.read_text(errors="replace")
        if code == 3:
            return GdnError(f"the compiler for {self.job.chip} refuses: {_cause(words, self.job.lowered)}")
        if "No space left" in words:
            return GdnError("the disk of the temporary folder is full; the compiler writes some 30 MB a kernel there.")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return GdnError(f"the compiler for {self.job.chip} {how}: {_last(words)}")


def _last(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check failed|Error|error:", line)]
    return (telling or lines or ["it said nothing"])[-1][:600]


def _cause(words: str, lowered: Lowered) -> str:
    """Return the compiler's message without traces, with the kernel's name; for memory, the amount and the blocks."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    stop = next((i for i, line in enumerate(lines) if re.match(r"(The MLIR|=====|Traceback|-{5})", line)), len(lines))
    text = " ".join(lines[: max(1, min(stop, 8))])
    named = [call for call in lowered.calls if call.name in words]
    calls = named or (list(lowered.calls) if len(lowered.calls) == 1 else [])
    who = f"kernel {calls[0].name}: " if calls else ""
    if "vmem" in text.lower():
        text = _over(text, calls) or text
    return f"{who}{text[:1200].rstrip('.')}."


def _over(text: str, calls: list[Call]) -> str | None:
    """Return how much memory is needed and by which blocks, from any of the compiler's three forms of this message."""
    scoped = re.search(r"[Uu]sed ([\d.]+\w+) of ([\d.]+\w+)", text) or re.search(
        r"size ([\d.]+\w+) and limit ([\d.]+\w+) exceeded", text
    )
    whole = re.search(r"size=(\d+)\) would exceed memory \(size=(\d+)\)", text)
    if scoped:
        more = re.search(r"[Ee]xceeded [a-z ]*by ([\d.]+[KMG]?)", text)
        said = f"it needs {scoped[1]} of VMEM and may use {scoped[2]} (see vmem_limit_bytes)"
        said += f", {more[1]} too much" if more else ""
    elif whole:
        needs, has = (int(n) / 2**20 for n in whole.groups())
        said = f"one allocation needs {needs:.0f} MiB of VMEM and may use {has:.0f}, {needs - has:.0f} MiB too much"
    else:
        return None
    return said + ("; its blocks: " + "; ".join(calls[0].blocks) if calls else "")
