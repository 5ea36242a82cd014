"""Run cases on one backend, one after another, in this process or in a process of the backend's own."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from .. import dispatch, door
from ..spec.backend import Backend
from ..spec.errors import GdnError, bad
from ..spec.operands import INPUT_DTYPES, INPUTS
from ..spec.precision import PRECISIONS, Rounding
from ..spec.problem import Problem
from ..spec.stages import STAGES
from ..spec.undisturbed import undisturbed
from .borders import at_borders
from .cases import Case, Inputs, build, in_rows
from .environment import environment
from .library_faults import library_fault
from .tensor_file import TensorFile, TensorWriter
from .worker import Worker

__all__ = [
    "CHUNK", "Outcome", "Settings", "Stages", "as_json", "backend_for", "computed", "each", "forget_programs", "one",
    "one_thread", "packed_tensors", "serve_run", "tell", "unpacked", "with_settings",
]  # fmt: skip

#: The number of tokens between the borders at which a backend without a probe is inspected, unless another is given.
CHUNK = 64
#: The number of memory mappings at which compiled programs are dropped; a case adds up to a thousand.
MANY_MAPS = 10_000
#: Parts of each stage: numpy arrays, or None where the variant has no such part.
Stages = dict[str, tuple[Any, ...]]
PARTS = {stage: 2 if stage in ("decay", "scores", "wy", "state") else 1 for stage in STAGES}


class Settings(NamedTuple):
    """The settings with which cases are computed, in addition to the options of the cases.

    ``precision`` and ``chunk_size`` are those of a call. q, k, v and the cotangent of o are cast to ``dtype``.
    ``stages`` says whether stages are probed, too, if the backend can. ``emulate`` is a precision whose roundings of
    operands on a TPU are emulated. ``stage_chunk`` is the chunk size for probing stages if it differs from that of the
    call.
    """

    precision: str | None = None
    chunk_size: int | None = None
    dtype: str | None = None
    stages: bool = False
    emulate: str | None = None
    stage_chunk: int | None = None

    def check(self) -> None:
        """Check the settings.

        Raises:
            GdnError: a setting has a value that no backend knows.
        """
        for name, value, allowed in (
            ("precision", self.precision, PRECISIONS),
            ("emulate", self.emulate, PRECISIONS),
            ("dtype", self.dtype, INPUT_DTYPES),
        ):
            if value is not None and value not in allowed:
                raise bad(name, repr(value), f"be one of {', '.join(allowed)}")
        if self.emulate is not None and self.precision not in (None, self.emulate):
            raise GdnError(f"precision is {self.precision!r} and emulate {self.emulate!r}; give one of them.")


class Outcome(NamedTuple):
    """The outcome of one case on one backend.

    ``status`` is "done", "refused" (the backend does not compute such calls) or "failed", and ``why`` gives the reason;
    for "done" with stages asked for, it says why there are none, or only states at chunk borders and outputs.
    ``tensors`` holds o, state, conv_state and grad_*. ``stages`` are those that the backend's ``probe`` returns, or
    empty. ``known`` is a measured error in this case of a library that the backend calls, or "". ``served`` names the
    kernels that computed the case, with tiles and warps, or functions of other libraries, if the backend reports them.
    """

    case: str
    status: str
    why: str
    tensors: dict[str, np.ndarray]
    stages: Stages
    rounding: Rounding
    seconds: float
    known: str = ""
    served: tuple[str, ...] = ()


def backend_for(name: str, settings: Settings) -> Backend:
    """Return the backend that computes with these settings.

    Raises:
        GdnError: no backend has that name, it cannot run here, or it cannot emulate a TPU.
    """
    settings.check()
    backend = dispatch.get(name)
    why = backend.not_here()
    if why is not None:
        raise GdnError(f"backend {name!r} cannot run here: {why}")
    if settings.emulate is not None:
        emulating = backend.emulating()
        if emulating is None:
            able = [b.name for b in dispatch.backends() if b.emulating() is not None]
            raise bad("--emulate", f"given for {name!r}", f"go with a backend that can: {', '.join(able)}")
        backend = emulating
    return backend


def with_settings(inputs: Inputs, settings: Settings) -> Inputs:
    """Return a case's inputs with the settings applied."""
    options = inputs.options._replace(
        precision=settings.emulate or settings.precision or inputs.options.precision,
        chunk_size=settings.chunk_size or inputs.options.chunk_size,
    )
    operands, cotangents = inputs.operands, inputs.cotangents
    if settings.dtype is not None:
        to = ml_dtypes.bfloat16 if settings.dtype == "bfloat16" else np.dtype(settings.dtype)
        cast = lambda x, names: {n: a.astype(to) if n in names else a for n, a in x.items()}  # noqa: E731
        operands, cotangents = cast(operands, INPUTS), cast(cotangents, ("o",))
    return inputs._replace(operands=operands, options=options, cotangents=cotangents)


def computed(backend: Backend, problem: Problem, inputs: Inputs) -> dict[str, np.ndarray]:
    """Compute results and gradients, and return them by name as numpy arrays."""
    cotangents = backend.from_numpy(inputs.cotangents)
    result, gradients = door.run_with_gradients(problem, backend, cotangents)
    found = {"o": result.o, "state": result.state, "conv_state": result.conv_state}
    found |= {f"grad_{name}": a for name, a in gradients.items()}
    arrays = {name: backend.to_numpy(a) for name, a in found.items() if a is not None}
    forget_programs()
    return arrays


def forget_programs() -> None:
    """Drop JAX's compiled programs before there are too many for one process.

    XLA on a CPU makes hundreds of memory mappings for each program. Linux ends a process that needs more than 65,530
    (vm.max_map_count), which a few hundred cases of different shapes reach.
    """
    jax, maps = sys.modules.get("jax"), Path("/proc/self/maps")
    if jax is not None and maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()


@undisturbed()
def one(backend: Backend, name: str, inputs: Inputs, settings: Settings) -> Outcome:
    """Run one case in this process; whatever the backend does, even failing, becomes an outcome."""
    refused = Outcome(name, "refused", "", {}, {}, Rounding(), 0.0)
    started = time.perf_counter()
    try:
        operands = backend.from_numpy(inputs.operands)
        problem, _ = door.normalise(operands, inputs.options, backend.name, check_values=True)
        with _serving(backend, problem) as launches:
            found = computed(backend, problem, inputs)
        served = tuple(map(str, launches))
    except GdnError as error:
        return refused._replace(why=str(error))
    except Exception as error:  # a backend that fails is a finding, not the end of a report
        sentence = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return refused._replace(status="failed", why=sentence)
    seconds = time.perf_counter() - started
    stages, why = _probed(backend, inputs, settings, found)
    fault = library_fault(backend.name, name)
    return Outcome(name, "done", why, found, stages, backend.rounding(problem.signature), seconds, fault, served)


Progress = Callable[[str, int, int], None]


def tell(progress: Progress | None, cases: Sequence[Case], done: int) -> None:
    """Report ``done`` cases as done, and the next one as running."""
    if progress is not None:
        progress(cases[done].name if done < len(cases) else "", done, len(cases))


def _serving(backend: Backend, problem: Problem) -> AbstractContextManager[Sequence[Any]]:
    """Return the backend's ``serving`` block, or an empty one for a call without tokens, which nothing computes."""
    s = problem.signature
    return backend.serving() if s.B * s.T else nullcontext(())


def _probed(
    backend: Backend, inputs: Inputs, settings: Settings, found: Mapping[str, np.ndarray]
) -> tuple[Stages, str]:
    """Return the backend's stages of a call, and a reason if they are incomplete.

    If the backend has no probe, there are only states at chunk borders and outputs, or no stages at all. Packed
    sequences become rows of their own.

    Args:
        backend: the backend.
        inputs: the call.
        settings: the settings of the run.
        found: the results of the call.
    """
    if not settings.stages or not found["o"].size:
        return {}, ""
    if inputs.options.step:
        return {}, "a single step has none"
    why = f"backend {backend.name!r} has no probe"
    if backend.has_stages:
        try:
            return _by_probe(backend, in_rows(inputs), settings), ""
        except GdnError as error:
            why = str(error)
        except Exception as error:  # the results exist, even if the probe fails
            why = f"its probe fails: {type(error).__name__}: {error}"
    size = settings.stage_chunk or inputs.options.chunk_size or CHUNK
    try:
        return at_borders(backend, inputs, size, found), why
    except Exception as error:
        return {}, f"{why.rstrip('.')}, and a shorter call: {error}"


def _by_probe(backend: Backend, inputs: Inputs, settings: Settings) -> Stages:
    """Return the stages that the backend's probe shows."""
    options = inputs.options._replace(chunk_size=settings.stage_chunk or inputs.options.chunk_size)
    try:
        problem, _ = door.normalise(backend.from_numpy(inputs.operands), options, backend.name)
    except GdnError:  # it does not support chunks of that size
        problem, _ = door.normalise(backend.from_numpy(inputs.operands), inputs.options, backend.name)
    return {
        stage: tuple(None if a is None else np.asarray(backend.to_numpy(a)) for a in parts)
        for stage, parts in backend.probe(problem).items()
    }


def packed_tensors(outcome: Outcome) -> dict[str, np.ndarray]:
    """Return the results and stages of an outcome as one table for a file, which ``unpacked`` reads back."""
    stages = {
        f"stage/{stage}/{i}": a for stage, parts in outcome.stages.items() for i, a in enumerate(parts) if a is not None
    }
    return {**outcome.tensors, **stages}


def unpacked(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Stages]:
    """Return the results and the stages of a table that ``packed_tensors`` made."""
    found = {name: a for name, a in tensors.items() if not name.startswith("stage/")}
    stages: Stages = {
        stage: tuple(tensors.get(f"stage/{stage}/{i}") for i in range(PARTS[stage]))
        for stage in STAGES
        if any(name.startswith(f"stage/{stage}/") for name in tensors)
    }
    return found, stages


def each(
    backend: Backend,
    cases: Sequence[Case],
    settings: Settings,
    inputs: Callable[[Case], Inputs] = build,
    recording: Path | None = None,
    in_process: bool = False,
) -> Iterator[tuple[Outcome, dict[str, Any]]]:
    """Run every case on one backend, in a process of its own if the backend requires one.

    Args:
        backend: the backend.
        cases: the cases.
        settings: the settings of the run.
        inputs: returns the inputs of a case.
        recording: the file that the inputs come from, if another process must read them.
        in_process: whether to stay in this process in any case.

    Yields:
        The outcome of each case, and the environment in which it ran.
    """
    if in_process or not backend.own_process:
        facts: dict[str, Any] = {}
        for case in cases:
            outcome = one(backend, case.name, with_settings(inputs(case), settings), settings)
            facts = facts or environment(backend)  # after a first call, which may set switches
            yield outcome, facts
        return
    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {
            "settings": settings._asdict(),
            "folder": folder,
            "recording": None if recording is None else str(recording),
        }
        worker = Worker(backend.name, cases, task="run", **more)
        facts = environment(backend)
        try:
            for answer in worker.answers():
                facts = answer.get("environment", facts)
                for outcome in _received(answer):
                    yield outcome, facts
        finally:
            worker.close()


def _received(answer: Mapping[str, Any]) -> Iterator[Outcome]:
    """Yield the outcome of one case from a worker's answer, or, if its process ended, of all the cases it left."""
    if "ended" in answer:
        for name in answer["left"]:
            yield Outcome(name, "failed", answer["ended"], {}, {}, Rounding(), 0.0)
        return
    file = TensorFile(answer["file"])
    tensors, stages = unpacked({name: file.read(name) for name in file.shapes})
    file.path.unlink()
    yield Outcome(
        answer["case"],
        answer["status"],
        answer["why"],
        tensors,
        stages,
        Rounding(**answer["rounding"]),
        answer["seconds"],
        answer["known"],
        tuple(answer["served"]),
    )


def serve_run(order: Mapping[str, Any], inputs: Callable[[Case], Inputs]) -> Iterator[dict[str, Any]]:
    """Compute cases in the child process, and pass the arrays of each through a file."""
    settings, folder = Settings(**order["settings"]), Path(order["folder"])
    backend = backend_for(order["backend"], settings)
    cases = [Case(**recipe) for recipe in order["cases"]]
    for i, (outcome, facts) in enumerate(each(backend, cases, settings, inputs, in_process=True)):
        path = folder / f"{i}.safetensors"
        with TensorWriter(path) as file:
            for name, a in packed_tensors(outcome).items():
                file.add(name, a)
        yield {
            "case": outcome.case, "status": outcome.status, "why": outcome.why, "seconds": outcome.seconds,
            "rounding": as_json(outcome.rounding), "file": str(path), "environment": facts, "known": outcome.known,
            "served": outcome.served,
        }  # fmt: skip


def as_json(rounding: Rounding) -> dict[str, Any]:
    """Return the arguments that construct a rounding, for JSON."""
    return {
        "operands": dict(rounding.operands),
        "chunk_size": rounding.chunk_size,
        "base2": rounding.base2,
        "stores": rounding.stores,
    }


def one_thread() -> None:
    """Limit torch and numpy's BLAS to one thread: cases are small, and more threads would only wait for each other."""
    threadpool_limits(1, user_api="blas")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, which not every backend needs
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
