"""The settings of JAX that kernels are traced under: its own, whatever the caller has set for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

__all__ = ["pallas_call"]


def pallas_call(*args: Any, **options: Any) -> Callable[..., Any]:
    """``pl.pallas_call``, whose kernel is traced with numbers of 32 bits and the usual promotion of dtypes and ranks.

    With ``jax_enable_x64`` a number in a kernel would be one of 64 bits, which a TPU does not have.
    """
    call = pl.pallas_call(*args, **options)

    def run(*operands: Any) -> Any:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return call(*operands)

    return run
