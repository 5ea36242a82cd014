"""Compile for a TPU without one: libtpu's compiler runs on any CPU.

    environment(os.environ)          # before jax is imported
    compiled = compile_for(chip_named("v6e"), function, *shapes)

A kernel that the compiler cannot take may end the process instead of raising: callers that must go on use a child.
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
    """Set what keeps libtpu from looking for a TPU around it, and from taking it for itself alone."""
    env.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else two compilers at a time fail at a lock
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-4",
    )


def compile_for(chip: Chip, function: Callable[..., Any], *shapes: Any, donated: Sequence[int] = ()) -> Any:
    """The executable of ``function`` for one device of a chip.

    Args:
        function: of JAX arrays, traced here.
        shapes: ``jax.ShapeDtypeStruct`` or trees of them, one an argument. donated: numbers of arguments whose memory
            results may take.
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
    """The slice whose devices a mesh with these axes has.

    Raises:
        GdnError: there is none.
    """
    return slice_of(chip, -(-math.prod(mesh.values()) // chip.devices))


def compile_on(chip: Chip, mesh: Mapping[str, int], exported: Any) -> Any:
    """The executable of an exported function for all devices of a mesh.

    Args:
        chip: of each device.
        mesh: names and sizes of the axes of the mesh that it was exported for.
        exported: a ``jax.export.Exported``.

    Raises:
        GdnError: no slice has so many devices.
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
    """A mesh of all devices of so many chips along one axis, to lower for: a ``jax.sharding.AbstractMesh``.

    Raises:
        GdnError: no slice has so many chips.
    """
    from jax._src import mesh
    from jax.sharding import AbstractMesh, AxisType

    kind = mesh.AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    devices = slice_of(chip, chips).devices
    return AbstractMesh((devices,), (name,), axis_types=(AxisType.Auto,), abstract_device=kind)


def on(chip: Chip) -> AbstractContextManager[Any]:
    """A context in which kernels that ask which TPU they are traced for are told this one."""
    from jax._src import mesh  # a device of a kind has no public home yet
    from jax.sharding import AbstractMesh, use_abstract_mesh

    kind = mesh.AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
