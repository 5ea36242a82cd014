"""torchax mended, so that whole models of transformers run as JAX programs, on a TPU or wherever JAX runs.

Three things keep the releases that are named here from it: torchax names overloads with named dimensions, which torch
no longer has, and cannot be imported; a view as the source of ``copy_``, by which the layers' caches keep what their
convolution has seen, is taken for a tensor; and the grouped product of experts has no lowering.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from ..spec.errors import GdnError, bad
from .patch import Patch

__all__ = ["VERSIONS", "patch_torchax"]

Array = Any
Tensor = Any

VERSIONS = {"torchax": "0.0.13", "torch": "2.13"}
"""The releases that are mended; others may need other mends, or none."""


def patch_torchax() -> Patch:
    """Mend torchax for whole models of transformers; call it before torchax is imported.

    With ``patch_transformers`` their layers are computed by this package's kernels, too::

        from portable_gdn.integrations import patch_torchax, patch_transformers

        patch_torchax(), patch_transformers()
        import torchax

        with torchax.default_env():
            logits = torchax.compile(model.to("jax"))(ids.to("jax"), use_cache=False).logits

    Works until undone, but that torchax stays imported.

    Returns:
        The patch, a context manager with ``undo``.

    Raises:
        GdnError: torch or torchax is not installed, or not of the releases in ``VERSIONS``.
    """
    for package in (*VERSIONS, "jax"):
        if importlib.util.find_spec(package) is None:
            raise GdnError(f"{package} is not installed; `pip install {package}` brings it.")
    here = {package: metadata.version(package) for package in VERSIONS}
    if any(here[package] != known and not here[package].startswith(f"{known}.") for package, known in VERSIONS.items()):
        have, known = (
            " with ".join(f"{package} {found[package]}" for package in VERSIONS) for found in (here, VERSIONS)
        )
        raise GdnError(f"{have} is installed; patch_torchax mends {known}, and these must be installed.")
    with _names_of_dimensions():
        environment = importlib.import_module("torchax").default_env()
    import torch

    patch = Patch()
    operations = environment._ops
    patch._replace(operations[torch.ops.aten.copy_], "func", _copy)
    patch._put(operations, torch.ops.aten._grouped_mm, _operator(torch.ops.aten._grouped_mm, _grouped_product))
    return patch


@contextmanager
def _names_of_dimensions() -> Iterator[None]:
    """Overloads that torch has no longer are found, as placeholders that nothing calls, while the block runs."""
    from torch import _ops

    packets: Any = _ops.OpOverloadPacket
    found = packets.__getattr__

    def named(self: Any, key: str) -> Any:
        try:
            return found(self, key)
        except AttributeError:
            if "imname" in key or "names" in key:
                return f"{self}.{key}"
            raise

    packets.__getattr__ = named
    try:
        yield
    finally:
        packets.__getattr__ = found


def _operator(operation: Any, function: Callable[..., Array]) -> Any:
    """A lowering of an operation to a function of JAX arrays."""
    from torchax.ops.ops_registry import Operator

    return Operator(operation, function, is_jax_function=True, is_user_defined=False, needs_env=False, is_view_op=False)


def _copy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``copy_`` whose source may be a view."""
    from torchax.view import View

    def copy(x: Tensor, y: Tensor, *args: Any, **options: Any) -> Tensor:
        return original(x, y.torch() if isinstance(y, View) else y, *args, **options)

    return copy


def _grouped_product(
    a: Array, b: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: Any = None
) -> Array:
    """torch's product of groups of rows with a matrix each.

    Args:
        a: [rows, K], or [M, rows], of which groups are multiplied each by its own.
        b: [groups, K, N], or [rows, N].
        offs: [groups], where each group of rows ends.
        bias, out_dtype: None; transformers gives none.

    Returns:
        [rows, N], or [groups, M, N].
    """
    import jax
    import jax.numpy as jnp

    if offs is None or bias is not None or out_dtype is not None or (a.ndim, b.ndim) not in ((2, 3), (2, 2)):
        raise bad(
            "a grouped product", f"of shapes {list(a.shape)} and {list(b.shape)}",
            "be of rows with a matrix for each group, or of rows with rows, with offs and without bias or out_dtype",
        )  # fmt: skip
    sizes = jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)
    if b.ndim == 3:
        return jax.lax.ragged_dot(a, b, sizes)
    over_rows = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (0,)), ((), ())), lhs_ragged_dimensions=[1], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(a, b, sizes, over_rows)
