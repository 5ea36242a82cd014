"""Compile for a TPU without one: libtpu's compiler runs on any CPU.

    environment(os.environ)          # before jax is imported
    compiled = compile_for(chip_named("v6e"), function, *shapes)

A kernel that the compiler cannot take may end the process instead of raising: callers that must go on use a child.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..chips import Chip

__all__ = ["compile_for", "environment", "on"]


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


def on(chip: Chip) -> AbstractContextManager[Any]:
    """A context in which kernels that ask which TPU they are traced for are told this one."""
    from jax._src import mesh  # a device of a kind has no public home yet
    from jax.sharding import AbstractMesh, use_abstract_mesh

    kind = mesh.AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
