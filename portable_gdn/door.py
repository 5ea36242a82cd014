"""The entry of every call: its arguments are checked once and become a Problem and the backend that will compute it.

A call like an earlier one (in libraries, shapes, dtypes, devices and options) costs only a look-up in a table. The
contents of arrays are not read, except for boundaries on the host outside a trace.

Numpy arrays that are passed with torch tensors or JAX arrays are copied here, once. JAX computes after the call has
returned, from memory that it shares with the caller, and autograd keeps boundaries for its backward pass; with the
copy, the caller may write into its own arrays as soon as the call returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from . import dispatch
from .spec.backend import Backend
from .spec.errors import GdnError, bad
from .spec.operands import BATCH_OPERANDS, DIFFERENTIABLE, ON_HOST
from .spec.problem import Meta, Options, Problem, Result, Signature, UpdateResult
from .spec.rules import check_boundaries, make_signature
from .watching import note

__all__ = [
    "check_states_every",
    "describe",
    "empty_result",
    "library_of",
    "normalise",
    "run",
    "run_update",
    "run_with_gradients",
]

Array = Any

_LIBRARY_OF_TYPE: dict[type, str | None] = {}
_CALLS: dict[Any, tuple[Signature, Backend]] = {}
_MOST_CALLS = 4096
_STARTS = next(iter(BATCH_OPERANDS))
_BOUNDARIES: dict[tuple[bytes, str, int], None] = {}


def library_of(x: Any) -> str | None:
    """Return the library of an array: "torch", "jax" or "numpy"; None for any other object."""
    if _compiling():  # each change of the table would cause a recompilation
        return _look(x)
    kind = type(x)
    try:
        return _LIBRARY_OF_TYPE[kind]
    except KeyError:
        pass
    found = _look(x)
    if found is not None:  # a type that was seen before its library was imported must be looked up again
        _LIBRARY_OF_TYPE[kind] = found
    return found


def _look(x: Any) -> str | None:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return "numpy" if isinstance(x, (np.ndarray, np.generic)) else None


def _compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def normalise(
    operands: dict[str, Array], options: Options, backend: str | None, check_values: bool = False
) -> tuple[Problem, Backend]:
    """Check a call and choose its backend.

    Args:
        operands: The arrays by name, without those that are None. ``cu_seqlens`` may be a list.
        options: The other arguments of the call.
        backend: The name of a backend, or None for the first that can run the call.
        check_values: Whether to check the contents of the arrays too.

    Returns:
        The problem and the backend that will compute it.

    Raises:
        GdnError: An argument is wrong, or no suitable backend can run the call.
    """
    operands = dict(operands)  # leave the caller's dict as it is
    if _compiling():  # numpy arrays have no dtype there
        bounds = operands.get("cu_seqlens")
        if isinstance(bounds, (list, tuple, np.ndarray)):
            operands["cu_seqlens"] = sys.modules["torch"].as_tensor(bounds).clone()
        signature = describe(operands, options)
        chosen = dispatch.choose(signature, backend)
    else:
        _lists_as_arrays(operands)  # before they become part of the key
        key = (
            tuple(operands),
            options,
            backend,
            os.environ.get(dispatch.ENVIRONMENT),
            dispatch.generation,
            *[_key(x) for x in operands.values()],
        )
        try:
            signature, chosen = _CALLS[key]
        except (KeyError, TypeError):  # TypeError: an option that cannot be hashed, which is an error anyway
            signature = describe(operands, options)
            chosen = dispatch.choose(signature, backend)
            if len(_CALLS) >= _MOST_CALLS:
                _CALLS.clear()
            _CALLS[key] = signature, chosen
        if signature.library != "numpy":
            for name, x in operands.items():
                if isinstance(x, (np.ndarray, np.generic)):
                    operands[name] = np.array(x)
        if "cu_seqlens" in operands:  # check the copy, since only the copy is used
            check_host_boundaries(operands["cu_seqlens"], signature.T)
        if options.update is not None:
            _check_host_rows(operands[_STARTS], signature.T)
    if check_values:
        from .values import check

        check(signature, operands)
    return Problem(signature, operands), chosen


def run(problem: Problem, backend: Backend) -> Result:
    """Compute a problem on a backend; a call without tokens is answered here, without the backend."""
    if problem.signature.B * problem.signature.T == 0:
        return empty_result(problem)
    note(problem, backend)
    return backend.run(problem)


def run_update(problem: Problem, backend: Backend) -> UpdateResult:
    """Compute an update of a pool; without tokens or rows, return zeros and the unchanged pool."""
    s, x = problem
    if s.T * s.N == 0:
        like = x["qkv"] if "qkv" in x else x["v"]
        if s.library == "torch":
            o = like.new_zeros((s.T, s.HV, s.V))
        else:
            xp: Any = np if s.library == "numpy" else sys.modules["jax"].numpy
            o = xp.zeros((s.T, s.HV, s.V), like.dtype)
        return UpdateResult(o, {name: a for name, a in x.items() if name.startswith("pool.")})
    note(problem, backend)
    return backend.update(problem)


def run_with_states(problem: Problem, backend: Backend, every: int) -> tuple[Result, Array]:
    """Compute a problem, and also return the states after every ``every`` tokens of each row or packed sequence.

    Returns:
        The result, and the states [B, T // every, ...].

    Raises:
        GdnError: As in ``check_states_every``.
    """
    s = problem.signature
    every = check_states_every(s, every)
    if s.B * s.T == 0:
        result = empty_result(Problem(replace(s, output_final_state=True), problem.operands))
        states: Any = result.state
        if s.packed:  # packed sequences are one row
            states = states[:1]
        return result if s.output_final_state else result._replace(state=None), states[:, None][:, :0]
    note(problem, backend)
    return backend.run_with_states(problem, every)


def check_states_every(s: Signature, every: Any) -> int:
    """Check ``output_states_every`` and return it as an int.

    Raises:
        GdnError: The value is not a positive integer, or the call has segment_ids or a symbolic number of tokens.
    """
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)) or every < 1:
        raise bad("output_states_every", repr(every), "be a positive integer")
    if s.symbolic:
        raise bad("output_states_every", f"given for T = {s.T} tokens, a symbol", "be left out under jax.export")
    if s.has("segment_ids"):
        raise bad("output_states_every", "given with segment_ids", "be left out: states belong to whole sequences")
    return int(every)


def run_with_gradients(
    problem: Problem, backend: Backend, cotangents: Mapping[str, Array]
) -> tuple[Result, dict[str, Array]]:
    """Compute a problem, and the cotangents of its float operands from the cotangents of "o" and "state"."""
    if problem.signature.B * problem.signature.T == 0:
        grads = {name: 0 * x for name, x in problem.operands.items() if name in DIFFERENTIABLE}
        if "initial_state" in grads and "state" in cotangents:
            grads["initial_state"] = cotangents["state"]
        return empty_result(problem), grads
    return backend.gradients(problem, cotangents)


def _key(x: Array) -> Any:
    """What tells one operand's kind from another's in the table of calls; never called while torch compiles."""
    library = _LIBRARY_OF_TYPE.get(type(x)) or library_of(x)
    if library == "torch":
        return (type(x), x.shape, x.dtype, x.device)
    if library == "jax":
        return (type(x), x.shape, x.dtype, None if isinstance(x, sys.modules["jax"].core.Tracer) else x.sharding)
    if library == "numpy":
        return ("numpy", x.shape, x.dtype)
    return type(x)


def _lists_as_arrays(operands: dict[str, Array]) -> None:
    """Replace boundaries and other integers that were given as lists by numpy arrays, in place."""
    for name, x in operands.items():
        if isinstance(x, (list, tuple)) and name in ON_HOST:
            operands[name] = _integers(name, x)


def _integers(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        raise bad(name, repr(values), "be a flat list of integers") from None
    if name in BATCH_OPERANDS and not array.size:  # no rows
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise bad(name, f"a list of {array.dtype.name if array.size else 'nothing'}", "hold integers")
    narrow = array.astype(np.int32)
    if narrow.tolist() == array.tolist():  # takes a third of the time of a search for the maximum
        return narrow
    return array.astype(np.int64)


def check_host_boundaries(cu_seqlens: Array, T: int) -> None:
    """Check boundaries that are in host memory; those on a device are not read."""
    array = _on_host(cu_seqlens)
    if array is None:
        return
    key = (array.tobytes(), array.dtype.char, T)
    if key in _BOUNDARIES:
        return
    check_boundaries(array.tolist(), T)
    if len(_BOUNDARIES) >= _MOST_CALLS:
        _BOUNDARIES.clear()
    _BOUNDARIES[key] = None


def _on_host(integers: Array) -> np.ndarray | None:
    """Return the contents of an array in host memory, or None for an array on a device, which is not read."""
    library = library_of(integers)
    if library == "torch" and integers.device.type == "cpu" and type(integers).__module__ == "torch":
        if sys.modules["torch"]._C._are_functorch_transforms_active():
            return None
        return integers.numpy()
    return integers if library == "numpy" else None


def _check_host_rows(starts: Array, T: int) -> None:
    """Check where the rows of a batch begin, if this is known on the host."""
    array = _on_host(starts)
    if array is None:
        return
    if array[0] != 0:
        raise bad(_STARTS, f"starting at {array[0]}", "start at 0")
    falls = np.flatnonzero(array[1:] < array[:-1])
    if len(falls):
        at = int(falls[0])
        raise bad(_STARTS, f"decreasing from {array[at]} to {array[at + 1]} at entry {at + 1}", "never decrease")
    if array[-1] > T:
        raise bad(_STARTS, f"ending at {array[-1]}", f"end at T = {T} or before; what lies behind its end is padding")


def describe(operands: dict[str, Array], options: Options) -> Signature:
    """Check the metadata of a call and return its signature; no array is read and no backend is involved.

    Raises:
        GdnError: An argument is wrong.
    """
    _lists_as_arrays(operands)
    library, like = _common_library(operands)
    meta = {}
    device = committed = None
    for name, x in operands.items():
        kind = library_of(x)
        if kind == "torch":
            place = str(x.device)
            meta[name] = Meta(tuple(x.shape), str(x.dtype).removeprefix("torch."), place)
        elif kind == "jax":
            place = _jax_platform(x)
            meta[name] = Meta(tuple(x.shape), x.dtype.name, place)
            if place != "traced" and x.committed:  # uncommitted arrays follow committed ones
                committed = committed or (name, x.devices())
                if x.devices() != committed[1]:
                    raise bad(name, f"on {x.devices()}", f"be on {committed[1]}, where {committed[0]} is")
        else:
            place = "cpu"
            meta[name] = Meta(tuple(x.shape), x.dtype.name, place)
        if name in ON_HOST or (kind == "numpy" and library == "jax") or place == "traced":
            continue
        if device is None:
            device, like = place, name
        elif place != device:
            raise bad(name, f"on {place}", f"be on {device}, where {like} is")
    if library == "jax" and (device is None or any(m.device == "traced" for m in meta.values())):
        device = "traced"
    assert device is not None
    return make_signature(library, device.split(":")[0], meta, options)


def _jax_platform(x: Array) -> str:
    if isinstance(x, sys.modules["jax"].core.Tracer):
        return "traced"
    return next(iter(x.devices())).platform


def _common_library(operands: dict[str, Array]) -> tuple[str, str]:
    """Return the library of a call's arrays, and the name of an operand of this library."""
    found: dict[str, str] = {}
    for name, x in operands.items():
        library = library_of(x)
        if library is None:
            raise bad(
                name,
                f"a {type(x).__module__}.{type(x).__qualname__}",
                "be a torch tensor, a JAX array or a numpy array",
            )
        if name in ON_HOST and library == "numpy":
            continue
        found.setdefault(library, name)
    if "torch" in found and "jax" in found:
        raise GdnError(
            f"{found['torch']} is a torch tensor and {found['jax']} a JAX array; all must be of one library."
        )
    if "torch" in found and "numpy" in found:
        raise bad(found["numpy"], "a numpy array", f"be a torch tensor, as {found['torch']} is")
    library = "jax" if "jax" in found else next(iter(found))
    return library, found[library]


def empty_result(problem: Problem) -> Result:
    """Return the result of a call without tokens: empty outputs, and the given states or zeros."""
    s, x = problem
    like = x["qkv"] if "qkv" in x else x["v"]
    library = s.library
    if library == "torch":
        float32 = sys.modules["torch"].float32
        make = lambda shape: like.new_zeros(shape, dtype=float32)  # noqa: E731
    elif library == "jax":
        import jax.numpy as jnp

        like, x = jnp.asarray(like), {name: jnp.asarray(a) for name, a in x.items() if name.endswith("state")}
        make = lambda shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
    else:
        make = lambda shape: np.zeros(shape, np.float32)  # noqa: E731
    # Derived from the input, so that it stays in the graph for differentiation.
    time = () if s.step else (s.T,)
    o = (like if s.conv is None else like[..., : s.HV * s.V]).reshape((s.B, *time, s.HV, s.V)) * 1
    if library == "torch":  # and the other operands stay in the graph too
        for a in x.values():
            o = o + a.sum() if getattr(a, "requires_grad", False) else o
    state = None
    if s.output_final_state:
        state = x["initial_state"] * 1 if "initial_state" in x else make(s.state_shape)
    conv_state = None
    if s.conv is not None:
        shape = (s.N, s.conv.width - 1, s.conv.channels)
        conv_state = make(shape) if "conv_state" not in x else x["conv_state"] + make(shape)
    return Result(o, state, conv_state)
