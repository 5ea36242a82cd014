"""What a port can be written as (``--to``)."""

from __future__ import annotations

from .family import FAMILY_TARGETS

__all__ = ["FAMILY_TARGETS", "ROOTS", "STEP", "TARGETS", "TREES"]

TARGETS = ("jax", "nnx", "orbax", "maxtext", *FAMILY_TARGETS)
TREES = ("jax", "nnx", "orbax")  # those in our own tree
STEP = "step"  # MaxText's trees have one
ROOTS = {"orbax": "state", "maxtext": "0/items"}  # where the tree lies in the folder
