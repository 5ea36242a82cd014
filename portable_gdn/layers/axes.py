"""What the axes of a layer's parameters hold, and so where its shards lie on a mesh."""

from __future__ import annotations

from typing import Any

from flax import nnx

from ..parallel.axes import AxisRules, partition_spec
from .explicit import Projection

__all__ = ["named", "named_linear", "partition_specs"]


def named(parameter: nnx.Param[Any], *axes: tuple[str | None, int] | None) -> nnx.Param[Any]:
    """The parameter with the names of its axes, and how many whole things each has; None is an axis never split."""
    whole = [axis or (None, 1) for axis in axes]
    parameter.set_metadata("axes", tuple(name for name, _ in whole))
    parameter.set_metadata("parts", tuple(count for _, count in whole))
    return parameter


def named_linear(
    linear: Projection, inside: tuple[str | None, int] | None, out: tuple[str | None, int] | None
) -> Projection:
    """The projection with the names of its kernel's rows and columns, and of its bias."""
    named(linear.kernel, inside, out)
    if linear.bias is not None:
        named(linear.bias, out)
    return linear


def partition_specs(module: Any, mesh: Any, rules: AxisRules | None = None) -> Any:
    """Where each parameter lies on a mesh: a ``PartitionSpec`` for each, in a state of the module's form.

    Args:
        module: a layer of ``portable_gdn.layers``, a model of ``portable_gdn.models``, or an ``nnx.State`` of one; what
            ``nnx.eval_shape`` gives will do.
        mesh: a ``jax.sharding.Mesh``.
        rules: which axes of the mesh split "heads", "embed" and so on, before ``portable_gdn.parallel.AXIS_RULES``.
            An axis that the devices do not divide, counted in whole heads, is left whole.

    Returns:
        The state; ``jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)`` are the shardings.

    Raises:
        GdnError: the rules speak of something that no axis is.
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
