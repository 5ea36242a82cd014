"""The contract of a backend: what the dispatcher, the door and the harness may ask of an implementation.

A subclass gives at least ``name``, ``libraries`` and ``run``; every other method has a default that holds for a backend
without the ability in question. Laws, which ``portable-gdn check`` and ``verify`` hold a backend to:

- ``refuses`` reads metadata alone, and a call that it does not refuse is computed.
- ``run`` changes no operand, and returns o in v's dtype and states in float32.
- ``gradients`` returns a cotangent for every operand that has a gradient, in the operand's dtype.
- ``update`` neither reads nor writes slots that its batch does not name; of torch tensors it writes the pool in place.
- An error is no larger than what follows from the roundings that ``rounding`` declares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np

from .errors import GdnError
from .pieces import run_by_pieces
from .precision import Rounding
from .problem import Problem, Result, Signature, UpdateResult
from .slots import call_of

__all__ = ["Backend", "Stages"]

Array = Any
#: The stages of every chunk by name, as ``spec.probe`` has them.
Stages = dict[str, tuple[Any, ...]]


class Backend(ABC):
    """An implementation of the rule for the arrays of some libraries.

    A package registers an instance by an entry point of the group ``portable_gdn.backends``; ``register_backend`` does
    so for one process.
    """

    # What it takes, and when it is chosen.

    name: str
    libraries: tuple[str, ...]
    """Whose arrays it takes: "numpy", "torch", "jax". The first is the one that the harness gives it."""
    auto: bool = False
    """Whether a call that names no backend may choose it."""
    priority: int = 70
    """The lower, the earlier it is tried."""
    slow: bool = False
    """Whether each new shape costs it seconds; the quick proof then runs the essential cases only."""
    own_process: ClassVar[bool] = False
    """Whether the harness must run its cases in a child process."""
    elsewhere: tuple[str, str] | None = None
    """(platform, backend): of a call that JAX traces, the compiler takes this backend for that platform and the other
    one for every other platform. ``alone`` is then the instance that leaves nothing to another."""

    counts_axes: ClassVar[bool] = False
    """Whether it may be traced inside ``jax.shard_map`` with ``check_vma=True``, which counts the axes of the mesh that
    each value varies over (``spec/jax_tracing.py`` has what that takes). A split call gives it False otherwise."""

    @property
    def alone(self) -> Backend:
        """The form of this backend that leaves nothing to another one: for calls that ask for it by name."""
        return self

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all (a missing package or device), as a sentence, or None."""
        return None

    def not_here(self) -> str | None:
        """Why no array of this process can be computed by it, where that is more than ``unavailable`` says."""
        return self.unavailable()

    def refuses(self, signature: Signature) -> str | None:
        """Why it cannot compute this call, as a sentence, or None. It must not read operands."""
        return None

    def refuses_update(self, signature: Signature) -> str | None:
        """Why it cannot compute this update of a pool of states, as a sentence, or None.

        By default what ``refuses`` says of the call that the update would be without a pool.
        """
        if self.libraries[0] == "jax" and type(self).update is Backend.update:
            return "it has no update of a pool of its own, and the common one writes in place, which JAX arrays do not"
        if signature.B * signature.T == 0:
            return None
        return self.refuses(call_of(signature))

    # What it computes.

    @abstractmethod
    def run(self, problem: Problem) -> Result:
        """Compute; differentiable by the library whose arrays came in, where that has automatic derivatives."""

    def run_with_states(self, problem: Problem, every: int) -> tuple[Result, Array]:
        """The result, and the states after every so many tokens, [B, T // every, ...]; by default piece by piece."""
        return run_by_pieces(self.run, problem, every)

    def update(self, problem: Problem) -> UpdateResult:
        """The outputs of an update, and its pool (``spec/slots.py`` says what an update means).

        By default gathered, computed by ``run`` and scattered, which needs to know the batch on the host.
        """
        from .updates import update_by_run

        return update_by_run(self.run, problem)

    def gradients(self, problem: Problem, cotangents: Mapping[str, Array]) -> tuple[Result, dict[str, Array]]:
        """The result, and the cotangent of every operand that has one, from those of "o" and "state".

        By default as torch or JAX derives them from ``run``.
        """
        if self.libraries[0] == "torch":
            from .torch_tensors import gradients

            return gradients(self.run, problem, cotangents)
        if self.libraries[0] == "jax":
            from .jax_arrays import gradients as of_jax

            return of_jax(self.run, problem, cotangents)
        raise GdnError(
            f"backend {self.name!r} has no gradients: {self.libraries[0]} derives none; it must bring its own."
        )

    # How its numbers travel and round.

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Array]:
        """Operands given as numpy arrays (bfloat16 by ml_dtypes) in this backend's own library, in the same dtypes."""
        if self.libraries[0] == "torch":
            from .torch_tensors import from_numpy

            return from_numpy(operands)
        if self.libraries[0] == "jax":
            from .jax_arrays import from_numpy as to_jax

            return to_jax(operands)
        return dict(operands)

    def to_numpy(self, array: Array) -> np.ndarray:
        """The contents of one of its arrays."""
        if self.libraries[0] == "torch":
            from .torch_tensors import to_numpy

            return to_numpy(array)
        return np.asarray(array)

    def rounding(self, signature: Signature) -> Rounding:
        """Which operands of which products it rounds for this call, and how; by default none beyond float32."""
        return Rounding()

    def emulating(self) -> Backend | None:
        """The backend that rounds operands of products as a TPU does, on any device; None where there is none."""
        return None

    # What it can show.

    def serves(self, signature: Signature) -> str:
        """What of a library, or which kernel, serves such a call; "" where there is nothing to tell."""
        return ""

    def serves_call(self, problem: Problem) -> str:
        """As ``serves``, of a call whose operands tell more than its signature does; they must not be read."""
        return self.serves(problem.signature)

    def serving(self) -> AbstractContextManager[Sequence[Any]]:
        """A block in which a list fills with what serves its calls."""
        return nullcontext(())

    derived_stages: tuple[str, ...] = ()
    """Names of the stages that it never forms; ``probe`` derives them with its own solver."""

    @property
    def has_stages(self) -> bool:
        """Whether ``probe`` shows stages."""
        return type(self).probe is not Backend.probe

    def probe(self, problem: Problem) -> Stages:
        """The stages of every chunk, in the dtype in which it stores them if that is not float32.

        Raises:
            GdnError: it shows none, in general or of this call.
        """
        raise GdnError(f"backend {self.name!r} has no stages to show.")
