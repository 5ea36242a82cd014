"""Logical names for the axes of a layer's parameters, which determine how they are sharded over a mesh."""

from __future__ import annotations

from typing import Any

from flax import nnx

from ..parallel.axes import AxisRules, partition_spec
from .explicit import Projection

__all__ = ["named", "named_linear", "partition_specs"]


def named(parameter: nnx.Param[Any], *axes: tuple[str | None, int] | None) -> nnx.Param[Any]:
    """Attach to a parameter the logical name of each axis and its number of indivisible parts; None is never split."""
    whole = [axis or (None, 1) for axis in axes]
    parameter.set_metadata("axes", tuple(name for name, _ in whole))
    parameter.set_metadata("parts", tuple(count for _, count in whole))
    return parameter


def named_linear(
    linear: Projection, inside: tuple[str | None, int] | None, out: tuple[str | None, int] | None
) -> Projection:
    """Attach to a projection the logical names of its kernel's rows and columns, and of its bias."""
    named(linear.kernel, inside, out)
    if linear.bias is not None:
        named(linear.bias, out)
    return linear


def partition_specs(module: Any, mesh: Any, rules: AxisRules | None = None) -> Any:
    """Return a ``PartitionSpec`` for each parameter of a module on a mesh.

    Args:
        module: A layer of ``portable_gdn.layers``, a model of ``portable_gdn.models``, or an ``nnx.State`` of one; the
            result of ``nnx.eval_shape`` suffices.
        mesh: A ``jax.sharding.Mesh``.
        rules: Which axes of the mesh split "heads", "embed" and so on; they take precedence over
            ``portable_gdn.parallel.AXIS_RULES``. An axis whose number of whole heads is not divisible by the number of
            devices is not split.

    Returns:
        An ``nnx.State`` with the structure of the module's, of which ``jax.tree.map(lambda spec: NamedSharding(mesh,
        spec), specs)`` makes shardings.

    Raises:
        GdnError: A rule has an unknown logical name.
    """
    from jax.sharding import PartitionSpec

    state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
    found = []
    for path, leaf in nnx.to_flat_state(state):
        known = leaf.get_metadata()
        axes = known.get("axes")
        spec = PartitionSpec() if axes is None else partition_spec(axes, known["parts"], mesh, rules)
        found.append((path, leaf.replace(spec)))
    return nnx.from_flat_state(found)
