"""FLA's operations: which one computes a call, what it takes, and one call of it.

| family | calls | heads | decay |
|---|---|---|---|
| gdn | beta, and one decay a head or none | HV a multiple of H | by head, zeros for DeltaNet |
| kda | beta, and finer decays | HV a multiple of H | by channel |
| gdn2 | erase and write gates of their own | q and k repeated to HV | by channel |
| gla | neither gate, finer decays | q and k repeated to HV | by channel |
| simple_gla | neither gate, one decay a head or none | q and k repeated to HV | by head |

Decays of groups are repeated to their channels, and so are gates that FLA wants by channel. The recurrent forms take
HV heads where the chunk forms do; they have no gradient, or none worth having, and serve calls of one token that want
none.

FLA takes unknown keywords without a word, so they are written out here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from ..spec.gates import L2_EPS, l2norm
from . import interpreter
from .families import Family, Rule

__all__ = ["Operands", "chunked", "fitted", "imported", "normalised", "recurrent"]


class Operands(NamedTuple):
    """Operands of the bare rule: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, n]; b and w [B, T, HV, ...] or None.

    b and w are the erase and the write gate; where the call has a beta, b [B, T, HV, 1] is both, and w is None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor | None
    w: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> Operands:
        """The operands that f makes of these; those that are None stay None."""
        return Operands._make(None if a is None else f(a) for a in self)


def fitted(kind: Family, x: Operands) -> Operands:
    """Heads repeated, and gates by channel, as far as this call's operation wants them.

    GDN-2's kernels multiply its gates with k and v in the dtype of those.
    """
    q, k, v, g, b, w = x
    K = k.shape[-1]
    if not kind.grouped and v.shape[2] > q.shape[2]:
        q, k = (a.repeat_interleave(v.shape[2] // q.shape[2], 2) for a in (q, k))
    if kind.by_channel and g.shape[-1] < K:
        g = g.repeat_interleave(K // g.shape[-1], -1)
    if kind.name == "gdn2":
        b = v.new_zeros(()).expand(*g.shape[:3], K) if b is None else b.to(v.dtype).expand(*b.shape[:3], K)
        w = v.new_ones(()).expand(v.shape) if w is None else w.to(v.dtype).expand(v.shape)
    return Operands(q, k, v, g, b, w)


def _gates(kind: Family, x: Operands) -> dict[str, Tensor]:
    """Decay and gates by FLA's names."""
    if kind.name == "gdn2":
        return {"g": x.g, "b": _there(x.b), "w": _there(x.w)}
    g = x.g if kind.by_channel else x.g[..., 0]
    return {"g": g} if x.b is None else {"g": g, "beta": x.b[..., 0]}


def _there(a: Tensor | None) -> Tensor:
    assert a is not None
    return a


def imported(module: str) -> Any:
    """A module of FLA, repaired where kernels are interpreted."""
    found = importlib.import_module(module)
    interpreter.repair_imported(module)
    return found


def chunked(rule: Rule, x: Operands, S: Tensor, cu_seqlens: Tensor | None, host: Tensor | None) -> Any:
    """o [B, T, HV, V] and the final states, by the chunk form; ``x`` fitted, boundaries on the device and the host."""
    kind = rule.kind
    op = getattr(imported(kind.module), kind.chunk)
    given = {"q": x.q, "k": x.k, "v": x.v, **_gates(kind, x), "initial_state": S}
    more: dict[str, Any] = {"chunk_size": rule.chunk} if rule.chunk and kind.name != "gla" else {}
    if kind.safe and rule.bounded:
        more["safe_gate"] = True
    if cu_seqlens is not None:
        more |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": host}
    given = {name: a.contiguous() for name, a in given.items()}
    return op(**given, scale=rule.scale, output_final_state=True, **more)


def recurrent(rule: Rule, x: Operands, S: Tensor) -> Any:
    """o [B, T, HV, V] and the final states, token by token, all in float32; without gradients."""
    kind = rule.kind
    op = getattr(imported(kind.module), kind.recurrent)
    more: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if rule.raw else {}
    if rule.raw and x.b is None:  # GLA's kernels have no norm
        x, more = x._replace(q=l2norm(xp, x.q.float()), k=l2norm(xp, x.k.float())), {}
    gates = _gates(kind, x)
    if kind.name == "gla":
        gates["gk"] = gates.pop("g")
    given = {"q": x.q, "k": x.k, "v": x.v, **gates, "initial_state": S}
    given = {name: a.contiguous() for name, a in given.items()}
    with torch.no_grad():
        return op(**given, scale=rule.scale, output_final_state=True, **more)


def normalised(x: Operands) -> Operands:
    """q and k normalised by FLA's kernel, in float32 and then rounded to their dtype."""
    op = imported("fla.modules.norm.l2norm").l2norm
    return x._replace(q=op(x.q, eps=L2_EPS), k=op(x.k, eps=L2_EPS))
