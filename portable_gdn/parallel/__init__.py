"""One call over many devices of a mesh: each computes its own rows, heads and tokens.

A call with ``sharding=`` (or with arrays that say how they are sharded) is cut here into one call a device, inside a
``jax.shard_map`` over the whole mesh, before it reaches the door; no backend knows of it. Importing this
imports no jax.
"""

from __future__ import annotations

from .axes import AXIS_RULES, call_sharding
from .sharding import Sharding

__all__ = ["AXIS_RULES", "Sharding", "call_sharding"]
