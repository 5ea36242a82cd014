"""Choose between a kernel and another backend's program when XLA's program is built.

Only then is it known for which platform the program is, and whether XLA will partition it over several devices by
itself. XLA cannot partition a TPU kernel, which jax therefore refuses to lower; it can partition another backend's
operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from ..spec.errors import GdnError

__all__ = ["kernel_or_else"]

Array = Any

_REMEDY = (
    "give the call sharding=portable_gdn.Sharding(batch=..., heads=...) with the axes of the mesh that split its rows "
    "and heads, or call it inside jax.shard_map over every axis of the mesh"
)
_chosen = Primitive("gated_delta_kernel")
_chosen.multiple_results = True
#: Both programs are of plain arrays, which newer releases of jax want to be told.
_chosen.is_high = lambda *args, **params: False  # type: ignore[method-assign]


def kernel_or_else(kernel: Callable[..., Any], elsewhere: Callable[..., Any] | None, *args: Any) -> Any:
    """Return the result of one of two functions for ``args``; the lowering chooses which.

    The kernel is used on a TPU if each device runs a whole program of its own: on one device, or inside a
    ``jax.shard_map`` over every axis of the mesh. If XLA partitions a program for TPUs, ``elsewhere`` is used and a
    warning says so. It is also used on every other platform.

    Args:
        kernel: A function of pytrees of arrays.
        elsewhere: The same computation without the kernel, with the same output shapes and dtypes. If it is None, the
            kernel is always used, and lowering raises a GdnError where XLA would have to partition it.
        args: Pytrees of arrays.
    """
    flat, tree = jax.tree.flatten(args)
    inside, shapes = jax.make_jaxpr(_of_leaves(kernel, tree), return_shape=True)(*flat)
    outside = None if elsewhere is None else jax.make_jaxpr(_of_leaves(elsewhere, tree))(*flat)
    found = _chosen.bind(*flat, kernel=inside, elsewhere=outside)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _of_leaves(function: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    return lambda *flat: function(*jax.tree.unflatten(tree, flat))


@_chosen.def_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(*args: Any, kernel: ClosedJaxpr, elsewhere: ClosedJaxpr | None) -> Any:
    return kernel.out_avals


@_chosen.def_impl  # type: ignore[untyped-decorator]
def _evaluate(*args: Array, kernel: ClosedJaxpr, elsewhere: ClosedJaxpr | None) -> Any:
    here = kernel if elsewhere is None or jax.default_backend() == "tpu" else elsewhere
    return jaxpr_as_fun(here)(*args)


def _batch(args: Any, dims: Any, *, kernel: ClosedJaxpr, elsewhere: ClosedJaxpr | None) -> Any:
    mapped = lambda jaxpr: jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))  # noqa: E731
    found = kernel_or_else(mapped(kernel), None if elsewhere is None else mapped(elsewhere), *args)
    return found, (0,) * len(found)


batching.primitive_batchers[_chosen] = _batch


def _lower(ctx: Any, *args: Any, jaxpr: ClosedJaxpr) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


def _lower_anywhere(ctx: Any, *args: Any, kernel: ClosedJaxpr, elsewhere: ClosedJaxpr | None) -> Any:
    return _lower(ctx, *args, jaxpr=kernel if elsewhere is None else elsewhere)


def _lower_for_tpu(ctx: Any, *args: Any, kernel: ClosedJaxpr, elsewhere: ClosedJaxpr | None) -> Any:
    if not _partitioned(ctx.module_context.axis_context):
        return _lower(ctx, *args, jaxpr=kernel)
    if elsewhere is None:
        raise GdnError(
            "backend 'pallas' cannot run this call: the program is for several devices and XLA is to partition it, "
            f"which it cannot do to a TPU kernel; {_REMEDY}; or leave the backend to us, and 'xla' computes the call."
        )
    warnings.warn(
        "A call of the gated delta rule is computed by 'xla' instead of the TPU kernel, since the program is for "
        f"several devices and XLA cannot partition a kernel; to run the kernel on each of them, {_REMEDY}.",
        stacklevel=2,
    )
    return _lower(ctx, *args, jaxpr=elsewhere)


def _partitioned(context: Any) -> bool:
    """Return whether XLA partitions the program; jax makes the same check before it lowers a TPU kernel, and raises.

    jax's axis contexts have no public names. That of ``shard_map`` knows which axes of the mesh are manual, that of
    ``jit`` knows the number of devices, and under ``pmap`` each device has its own program.
    """
    mesh = getattr(context, "mesh", None)
    if mesh is not None:
        manual = frozenset(context.manual_axes)
        every = manual | frozenset(mesh.manual_axes) == frozenset(mesh.axis_names)
        return not every and (bool(manual) or mesh.size > 1)
    return getattr(context, "num_devices", 1) != 1


mlir.register_lowering(_chosen, _lower_anywhere)
mlir.register_lowering(_chosen, _lower_for_tpu, platform="tpu")
