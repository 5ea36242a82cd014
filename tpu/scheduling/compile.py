"""Compile for a TPU without one: libtpu's compiler runs on any CPU.

    environment(os.environ)          # before jax is imported
    compiled = compile_for(chip_named("v6e"), function, *shapes)

A kernel that the compiler cannot take may end the process instead of raising: callers that must go on use a child.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from ..chips import Chip

__all__ = ["compile_for", "environment"]


def environment(env: MutableMapping[str, str]) -> None:
    """Set what keeps libtpu from looking for a TPU around it, and from taking it for itself alone."""
    env.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else two compilers at a time fail at a lock
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-4",
    )


def compile_for(chip: Chip, function: Callable[..., Any], *shapes: Any) -> Any:
    """The executable of ``function`` for one device of a chip.

    Args:
        function: of JAX arrays, traced here.
        shapes: ``jax.ShapeDtypeStruct`` or trees of them, one an argument.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    where = SingleDeviceSharding(device)
    traced = jax.jit(function, in_shardings=where, out_shardings=where, keep_unused=True).trace(*shapes)
    return traced.lower(lowering_platforms=("tpu",)).compile()
