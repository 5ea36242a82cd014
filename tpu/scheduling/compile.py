"""Compile for a TPU without one: libtpu's compiler runs on any CPU.

    environment(os.environ)          # before jax is imported
    compiled = compile_for(chip_named("v6e"), function, *shapes)

A kernel that the compiler cannot compile may end the process instead of raising. Callers that must survive this use a
child process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...spec.errors import bad
from ..chips import Chip
from ..slices import Slice, slice_of

__all__ = ["chip_mesh", "compile_for", "compile_on", "environment", "on", "slice_for"]


def environment(env: MutableMapping[str, str]) -> None:
    """Set the variables that keep libtpu from looking for a TPU, and from reserving one for itself."""
    env.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else two compilers at a time fail at a lock
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-4",
    )


def compile_for(chip: Chip, function: Callable[..., Any], *shapes: Any, donated: Sequence[int] = ()) -> Any:
    """Compile ``function`` for one device of a chip and return the executable.

    Args:
        chip: The chip.
        function: A function of JAX arrays, which is traced here.
        shapes: A ``jax.ShapeDtypeStruct`` or a tree of them for each argument.
        donated: The numbers of the arguments whose memory results may reuse.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    where = SingleDeviceSharding(device)
    with on(chip):
        jitted = jax.jit(
            function, in_shardings=where, out_shardings=where, keep_unused=True, donate_argnums=tuple(donated)
        )
        traced = jitted.trace(*shapes)
        lowered = traced.lower(lowering_platforms=("tpu",))
    return lowered.compile()


def slice_for(chip: Chip, mesh: Mapping[str, int]) -> Slice:
    """Return the slice whose number of devices is that of a mesh with these axes.

    Raises:
        GdnError: There is no such slice.
    """
    return slice_of(chip, -(-math.prod(mesh.values()) // chip.devices))


def compile_on(chip: Chip, mesh: Mapping[str, int], exported: Any) -> Any:
    """Compile an exported function for all devices of a mesh and return the executable.

    Args:
        chip: The chip that the devices belong to.
        mesh: The names and sizes of the axes of the mesh for which the function was exported.
        exported: A ``jax.export.Exported``.

    Raises:
        GdnError: No slice has this number of devices.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    where = slice_for(chip, mesh)
    found: Any = topologies.get_topology_desc(platform="tpu", topology_name=where.topology).devices
    if not len(found) == where.devices == math.prod(mesh.values()):
        raise bad("mesh", f"of {math.prod(mesh.values())} devices", f"be of {len(found)}: {where.topology} has so many")
    order = where.order([(d.coords, d.core_on_chip) for d in found])
    devices = np.array([found[i] for i in order]).reshape(tuple(mesh.values()))
    shardings = exported.in_shardings_jax(Mesh(devices, tuple(mesh)))
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(exported.in_avals, shardings, strict=True)
    ]
    with on(chip):
        return jax.jit(exported.call, keep_unused=True).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()


def chip_mesh(chip: Chip, chips: int, name: str = "devices") -> Any:
    """Return a ``jax.sharding.AbstractMesh`` of all devices of a number of chips along one axis, to lower programs for.

    Raises:
        GdnError: No slice has this number of chips.
    """
    from jax._src import mesh
    from jax.sharding import AbstractMesh, AxisType

    kind = mesh.AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    devices = slice_of(chip, chips).devices
    return AbstractMesh((devices,), (name,), axis_types=(AxisType.Auto,), abstract_device=kind)


def on(chip: Chip) -> AbstractContextManager[Any]:
    """Return a context in which kernels are traced for this chip."""
    from jax._src import mesh  # a device of a kind has no public home yet
    from jax.sharding import AbstractMesh, use_abstract_mesh

    kind = mesh.AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
