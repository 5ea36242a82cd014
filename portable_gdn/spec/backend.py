"""The contract of a backend: the methods that the public functions, the dispatcher and the harness call.

A subclass defines at least ``name``, ``libraries`` and ``run``. Every other method has a default that suits a backend
without the ability in question. ``portable-gdn check`` and ``portable-gdn verify`` test that it keeps these laws:

- ``refuses`` reads metadata only, and the backend computes every call that it does not refuse.
- ``run`` changes no operand, and returns o in v's dtype and states in float32.
- ``gradients`` returns a cotangent for every operand that has a gradient, in the operand's dtype.
- ``update`` neither reads nor writes slots that its batch does not name. It writes a pool of torch tensors in place.
- The backend's errors are no larger than the roundings that ``rounding`` declares can explain.
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
#: The stages of every chunk by name, in the form that ``spec.probe`` describes.
Stages = dict[str, tuple[Any, ...]]


class Backend(ABC):
    """An implementation of the rule for the arrays of one or more libraries.

    A package registers an instance through an entry point of the group ``portable_gdn.backends``; ``register_backend``
    registers one for the current process only.
    """

    # Which arrays it takes, and when it is chosen.

    name: str
    libraries: tuple[str, ...]
    """The libraries whose arrays it takes, of "numpy", "torch" and "jax". The harness uses the first one."""
    auto: bool = False
    """Whether it may be chosen for a call that names no backend."""
    priority: int = 70
    """Backends with a lower number are tried earlier."""
    slow: bool = False
    """Whether it needs seconds for each new shape; the quick proof then runs only the essential cases."""
    own_process: ClassVar[bool] = False
    """Whether the harness must run its cases in a child process."""
    elsewhere: tuple[str, str] | None = None
    """A pair (platform, backend), or None. When JAX traces a call without knowing the platform, the compiler uses this
    backend on the platform named and the backend named on all others. ``alone`` is then this backend without the other.
    """

    counts_axes: ClassVar[bool] = False
    """Whether it can be traced inside ``jax.shard_map`` with ``check_vma=True``, which tracks the mesh axes over which
    each value varies (``spec/jax_tracing.py`` explains what that requires). If it cannot, a call that is split over a
    mesh passes ``check_vma=False``."""

    @property
    def alone(self) -> Backend:
        """Return this backend without a fallback to another one, for calls that ask for it by name."""
        return self

    def unavailable(self) -> str | None:
        """Return a sentence that says why it cannot run on this machine (a missing package or device), or None."""
        return None

    def not_here(self) -> str | None:
        """Return a sentence that says why it cannot compute any array of this process, or None.

        This may give a reason where ``unavailable`` gives none: a backend for TPUs can compile programs on a machine
        without a TPU, but compute nothing there. The default returns what ``unavailable`` returns.
        """
        return self.unavailable()

    def refuses(self, signature: Signature) -> str | None:
        """Return a sentence that says why it cannot compute this call, or None. It must not read operands."""
        return None

    def refuses_update(self, signature: Signature) -> str | None:
        """Return a sentence that says why it cannot compute this update of a pool of states, or None.

        The default asks ``refuses`` about the call that the update would be without a pool.
        """
        if self.libraries[0] == "jax" and type(self).update is Backend.update:
            return "it has no update of a pool of its own, and the common one writes in place, which JAX arrays do not"
        if signature.B * signature.T == 0:
            return None
        return self.refuses(call_of(signature))

    # Computing.

    @abstractmethod
    def run(self, problem: Problem) -> Result:
        """Compute a call.

        The result must be differentiable by the library of the operands if that library has automatic differentiation.
        """

    def run_with_states(self, problem: Problem, every: int) -> tuple[Result, Array]:
        """Compute a call, and return its result and the states [B, T // every, ...] after every ``every`` tokens.

        The default cuts the call into pieces of ``every`` tokens and runs them one after another.
        """
        return run_by_pieces(self.run, problem, every)

    def update(self, problem: Problem) -> UpdateResult:
        """Compute an update, and return its outputs and its pool (``spec/slots.py`` defines updates).

        The default gathers the states, calls ``run`` and scatters the results. It must read the batch on the host.
        """
        from .updates import update_by_run

        return update_by_run(self.run, problem)

    def gradients(self, problem: Problem, cotangents: Mapping[str, Array]) -> tuple[Result, dict[str, Array]]:
        """Compute a call and its gradients.

        The default differentiates ``run`` with torch or JAX.

        Args:
            problem: the call.
            cotangents: the cotangents of "o" and "state"; a missing one is zeros.

        Returns:
            The result, and the cotangent of every operand that has a gradient, by the operand's name.

        Raises:
            GdnError: the backend's first library has no automatic differentiation, and the backend does not override
                this method.
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

    # Conversion and rounding.

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Array]:
        """Convert numpy arrays (bfloat16 as in ml_dtypes) to arrays of this backend's library with equal dtypes."""
        if self.libraries[0] == "torch":
            from .torch_tensors import from_numpy

            return from_numpy(operands)
        if self.libraries[0] == "jax":
            from .jax_arrays import from_numpy as to_jax

            return to_jax(operands)
        return dict(operands)

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return the contents of one of its arrays as a numpy array."""
        if self.libraries[0] == "torch":
            from .torch_tensors import to_numpy

            return to_numpy(array)
        return np.asarray(array)

    def rounding(self, signature: Signature) -> Rounding:
        """Return the operands of products that it rounds for this call, and how. The default is float32 throughout."""
        return Rounding()

    def emulating(self) -> Backend | None:
        """Return a backend that rounds operands of products as a TPU does, on any device, or None if there is none."""
        return None

    # Inspection.

    def serves(self, signature: Signature) -> str:
        """Return the kernel, or the function of a library, that computes such a call, or "" if there is no choice."""
        return ""

    def serves_call(self, problem: Problem) -> str:
        """Return what ``serves`` returns, for a call whose operands say more than its signature.

        It must not read the operands' contents.
        """
        return self.serves(problem.signature)

    def serving(self) -> AbstractContextManager[Sequence[Any]]:
        """Return a context manager whose list collects what computes the calls made within the block."""
        return nullcontext(())

    derived_stages: tuple[str, ...] = ()
    """Names of the stages that it never computes in a call; ``probe`` derives them with the backend's own solver."""

    @property
    def has_stages(self) -> bool:
        """Whether ``probe`` returns stages."""
        return type(self).probe is not Backend.probe

    def probe(self, problem: Problem) -> Stages:
        """Return the stages of every chunk in float32, or in the dtype in which the backend stores them.

        Raises:
            GdnError: the backend shows no stages, or none for this call.
        """
        raise GdnError(f"backend {self.name!r} has no stages to show.")
