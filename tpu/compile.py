"""Compile for a TPU without one: libtpu's compiler runs on any CPU. Small; a process should compile one thing.

    environment(os.environ)          # before jax is imported
    compiled = compile_for("v6e", function, *shapes)

A kernel that the compiler cannot take may end the process instead of raising: callers that must go on use a child.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

__all__ = ["CHIPS", "compile_for", "environment"]

#: Topologies by chip, of the smallest slice that libtpu describes.
CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}


def environment(env: MutableMapping[str, str]) -> None:
    """Set what keeps libtpu from looking for a TPU around it, and from taking it for itself alone."""
    env.update(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else two compilers at a time fail at a lock
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-4",
    )


def compile_for(chip: str, function: Callable[..., Any], *shapes: Any) -> Any:
    """The executable of ``function`` for one chip.

    Args:
        chip: a key of ``CHIPS``.
        function: of JAX arrays, traced here.
        shapes: ``jax.ShapeDtypeStruct`` or trees of them, one an argument.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    where = SingleDeviceSharding(device)
    traced = jax.jit(function, in_shardings=where, out_shardings=where).trace(*shapes)
    return traced.lower(lowering_platforms=("tpu",)).compile()
