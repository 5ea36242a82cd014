"""The backends ``pallas``, the rule by Pallas kernels on TPUs, and ``pallas-interpret``, the same kernels on a CPU.

Importing this module does not import jax.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..backends.xla_backend import BACKEND as XLA
from ..backends.xla_backend import pool_apart
from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.precision import DEFAULT, FAST, HIGHEST, NORM_INPUTS, Rounding
from ..spec.problem import Problem, Result, Signature, UpdateResult
from .chips import target
from .kernels.common.tiles import LANES
from .kernels.epilogue.plan import describe_norm
from .kernels.pipelined.backward_plan import describe_gradients
from .kernels.pipelined.plan import describe, norm_inside, pipeline
from .kernels.plain.plan import TABLE_LIMIT, backward_plan, plan
from .kernels.window.plan import window_plan

if TYPE_CHECKING:
    from .execution import Execution

__all__ = ["INTERPRETER", "PALLAS", "PALLAS_INTERPRET", "Interpreted", "Pallas"]

#: "tpu" chooses the interpreter that models a TPU's memories, and finds races, stray reads and unwritten memory.
INTERPRETER = "PORTABLE_GDN_PALLAS_INTERPRET"

#: What enters the products of the kernels, forward and backward. W is not among them: no kernel forms it.
_FORWARD = ("q", "k", "S", "A", "T", "R", "Aqk", "Vn")
_BACKWARD = ("dO", "dS", "dVn", "X", "dA")


def _by_xla(s: Signature, operands: dict[str, Any]) -> tuple[Any, Any, Any]:
    return tuple(XLA.run(Problem(s, operands)))


class Pallas(Backend):
    """Compute the rule by Pallas kernels."""

    name = "pallas"
    libraries = ("jax",)
    auto = True
    priority = 20
    counts_axes = True
    #: What of a call's prologue its kernels can do themselves.
    inside = ("conv", "qk_l2norm", "gate")
    #: Stages that its kernel never forms: ``probe`` derives them with its own solver.
    derived_stages = ("wy",)
    #: Where the operands are traced: the platform that the kernel is for, and the backend for every other one. The
    #: compiler chooses between them.
    elsewhere: tuple[str, str] | None = ("tpu", "xla")

    def __init__(self, stages: Any = None) -> None:
        """``stages``: a replacement for ``kernels.plain.stages``, to test the effect of a fault in one of them."""
        self._stages = stages

    @cached_property
    def alone(self) -> Pallas:
        """Return this backend without ``elsewhere``, for calls that ask for it by name."""
        return self if self.elsewhere is None else Alone(self._stages)

    @property
    def stages(self) -> Any:
        """Return the functions that the kernel is made of."""
        if self._stages is None:
            from .kernels.plain import stages

            return stages
        return self._stages

    def unavailable(self) -> str | None:
        """Return why it cannot run here, or None. A TPU is not required: a traced call may be compiled for one."""
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed; `pip install 'portable-gdn[tpu]'` brings it."
        return None

    def not_here(self) -> str | None:
        """Return why it can compute no array of this process, although programs may be compiled for another machine."""
        why = self.unavailable()
        if why is None:
            import jax

            if jax.default_backend() != "tpu":
                why = "no TPU is here; 'pallas-interpret' runs the same kernel on a CPU"
        return why

    def refuses(self, signature: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        if signature.device not in ("tpu", "traced"):
            return (
                f"these arrays are on {signature.device}, and it is for TPUs; "
                "'pallas-interpret' runs the same kernel on a CPU"
            )
        return _refuses(signature)

    def serves(self, signature: Signature) -> str:
        """Say which kernel and plan compute a call and its gradients, and why the other kernel does not."""
        chip = target()
        if signature.update is not None:
            p = window_plan(signature, chip)
            assert p is not None
            form = "as one chunk" if p.chunked else "one by one"
            return (
                f"window, {p.value_heads} value heads and {p.places} tokens a step at most, {form}; longer rows by XLA"
            )
        parts = (
            describe(signature, chip),
            f"gradients: {describe_gradients(signature, chip)}",
            describe_norm(signature, chip),
        )
        return "; ".join(filter(None, parts))

    def _interpret(self) -> Any:
        return False

    def _execution(self, s: Signature) -> Execution:
        from .execution import Execution

        return Execution(s, target(), self._interpret(), self.stages, _by_xla, self.elsewhere is not None)

    def run(self, problem: Problem) -> Result:
        """Compute a call, differentiably. With ``elsewhere``, the lowering chooses for traced operands."""
        from .calls import compute

        return Result(*compute(self._execution(problem.signature), problem.operands))

    def refuses_update(self, signature: Signature) -> str | None:
        """Why it cannot compute this update, or None."""
        if signature.device not in ("tpu", "traced"):
            return self.refuses(signature)
        return _refuses_update(signature)

    def update(self, problem: Problem) -> UpdateResult:
        """Return the outputs of an update and its pool, which reuses the memory of the given one."""
        from .update import update

        return UpdateResult(*update(self._execution(problem.signature), *pool_apart(problem.operands)))

    def run_with_states(self, problem: Problem, every: int) -> tuple[Result, Any]:
        """Compute a call, and return also the states after every ``every`` tokens.

        At multiples of the kernel's chunks they cost nothing. These chunks are those of the row, not of packed
        sequences, which ``xla`` computes.
        """
        from .calls import compute_with_states

        s, x = problem
        if s.packed:
            return XLA.run_with_states(problem, every)
        out, states = compute_with_states(self._execution(s), every, x)
        return Result(*out), states

    def gradients(self, problem: Problem, cotangents: Mapping[str, Any]) -> tuple[Result, dict[str, Any]]:
        """Return the result and the operands' cotangents, from one compiled program."""
        from .calls import compute_gradients

        s, x = problem
        result, found = compute_gradients(self._execution(s), x, dict(cotangents))
        return Result(*result), found

    def probe(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """Return the stages of every chunk by name, for calls without packed sequences; see ``probing.probe``."""
        from .probing import probe

        return probe(self._execution(problem.signature), problem.operands)

    def rounding(self, signature: Signature) -> Rounding:
        """Return what the kernels round. Other variants have xla's gradients, which round nothing on a CPU."""
        kept, here = {"highest": HIGHEST, "default": DEFAULT, "fast": FAST}[signature.precision], target()
        names = (
            _FORWARD if signature.device == "cpu" and backward_plan(signature, here) is None else _FORWARD + _BACKWARD
        )
        found = {name: format for name, format in kept.items() if name in names}
        if signature.norm is not None and signature.dtype != "float32" and signature.precision != "highest":
            inside = norm_inside(signature) and pipeline(signature, here) is not None
            found |= dict.fromkeys(("o_kept",) if inside else NORM_INPUTS, signature.dtype)
        return Rounding(found, plan(signature, here).C)


class Alone(Pallas):
    """The backend for a call that names it: it never falls back to another, whatever the compiler compiles for."""

    elsewhere = None


class Interpreted(Pallas):
    """Run the kernels in Pallas' interpreters, on any platform of XLA."""

    name = "pallas-interpret"
    auto = False
    priority = 91
    slow = True
    counts_axes = False
    elsewhere = None

    def refuses(self, signature: Signature) -> str | None:
        """Why it cannot compute this call, or None."""
        return _refuses(signature)

    def refuses_update(self, signature: Signature) -> str | None:
        """Why it cannot compute this update, or None."""
        return _refuses_update(signature)

    def not_here(self) -> str | None:
        """Return None: interpreters run wherever jax does."""
        return self.unavailable()

    def emulating(self) -> Interpreted:
        """Return the backend itself: its products round as the precision says on any device."""
        return self

    def _interpret(self) -> Any:
        chosen = os.environ.get(INTERPRETER, "generic")
        if chosen == "generic":
            return True
        if chosen != "tpu":
            raise GdnError(f"{INTERPRETER} is {chosen!r}; it must be 'generic' or 'tpu'.")
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")


def _refuses(s: Signature) -> str | None:
    """Return why the kernel cannot compute this call on its chip, or None."""
    if s.step:
        return "its kernel is for whole sequences; 'xla' runs a step"
    if s.dtype == "float16":
        return "TPU kernels cannot load float16; 'xla' takes it, or give bfloat16 or float32"
    if s.symbolic:
        return (
            f"a dimension is symbolic (B = {s.B}, T = {s.T}, N = {s.N}), and its kernel's grid must be known; "
            "'xla' takes it"
        )
    if s.B * s.T == 0:
        return None
    try:
        here = target()
    except GdnError as error:
        return str(error)
    p = plan(s, here)
    if p.vmem > here.vmem_limit:
        return (
            f"a step of its kernel would need {p.vmem / 2**20:.0f} MiB of VMEM for {p.heads} value heads of "
            f"{s.K} x {s.V} with chunks of {p.C} tokens, and may use {here.vmem_limit >> 20}"
        )
    if p.table_bytes > TABLE_LIMIT:
        return (
            f"its table of {p.chunks} chunks would need {p.table_bytes >> 10} KiB of scalar memory, "
            f"and may use {TABLE_LIMIT >> 10}; split the call by rows or sequences"
        )
    return None


def _refuses_update(s: Signature) -> str | None:
    """Return why the window kernel cannot compute this update on its chip, or None."""
    if s.symbolic:
        return "the numbers of tokens and rows of an update must be known when it is compiled"
    if s.state_layout != "kv":
        return "its window kernel takes states [S, HV, K, V] only, state_layout 'kv'; 'xla' takes both"
    if s.K % LANES or s.V % LANES:
        return f"its window kernel takes heads of multiples of {LANES} channels, and these are {s.K} x {s.V}"
    if s.T * s.N == 0:
        return None
    try:
        here = target()
    except GdnError as error:
        return str(error)
    if window_plan(s, here) is None:
        return (
            f"a step of its window kernel would not fit into VMEM, with {s.K} x {s.V} states of {s.HV // s.H} value "
            "heads a key head and the tokens that may wait"
        )
    return None


PALLAS = Pallas()
PALLAS_INTERPRET = Interpreted()
