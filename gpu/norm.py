"""A mixer's output norm and gate by FLA's fused kernels, forward and backward, which compute in float32.

| call | FLA's |
|---|---|
| activation silu or sigmoid of z | ``rms_norm_gated`` |
| no gate | ``rms_norm`` |

They read the output in the dtype in which FLA's rule wrote it, which is that of its operands. The specification's norm
is used instead if a call must be deterministic, since the kernels tune themselves by timing; while torch.compile
traces, which it cannot do through the kernels; and if z has more bits than that output, to which they would round z's
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from ..spec.problem import Signature
from ..spec.prologue import finish, masked
from .families import norm_is_fused
from .operations import imported

__all__ = ["finished", "fused_norm"]


def finished(s: Signature, x: Mapping[str, Any], o: Tensor) -> Tensor:
    """Return the rule's output o [B, T, HV, V] as the call returns it, like ``spec.prologue.finish``."""
    wide = "z" in x and x["z"].element_size() > o.element_size()
    if not norm_is_fused(s) or torch.compiler.is_compiling() or o.is_meta or wide:
        return finish(xp, s, x, o)
    assert s.norm is not None
    z = masked(xp, s, x, "z").reshape(o.shape) if s.has("z") else None
    y = fused_norm(o, z, x.get("norm_weight"), *s.norm)
    return finish(xp, replace(s, norm=None), x, y)


def fused_norm(o: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, activation: str | None) -> Tensor:
    """Compute the norm of o [..., V] in o's dtype, times weight [V] and the activated z [..., V], if they are given."""
    if weight is None:
        weight = o.new_ones(o.shape[-1], dtype=torch.float32)
    if z is None:
        return imported("fla.modules.norm.layernorm").rms_norm(o, weight, None, eps=eps)
    op = imported("fla.modules.norm.fused_norm_gate").rms_norm_gated
    return op(o, z, weight, None, activation=activation, eps=eps)
