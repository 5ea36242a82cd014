"""Split one call over the devices of a mesh: each device computes its own rows, heads and tokens.

A call with ``sharding=``, or with arrays that are already sharded, is split into one call per device inside a
``jax.shard_map`` over the whole mesh. Backends see only the call of one device. Importing this package does not import
jax.
"""

from __future__ import annotations

from .axes import AXIS_RULES, call_sharding
from .sharding import Sharding

__all__ = ["AXIS_RULES", "Sharding", "call_sharding"]
