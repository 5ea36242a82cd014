"""FLA's operations: the one that computes a call, its operands, and the call itself.

| family | calls | heads | decay |
|---|---|---|---|
| gdn | beta, and one decay per head or none | HV a multiple of H | per head, zeros for DeltaNet |
| kda | beta, and finer decays | HV a multiple of H | per channel |
| gdn2 | separate erase and write gates | q and k repeated to HV | per channel |
| gla | neither gate, finer decays | q and k repeated to HV | per channel |
| simple_gla | neither gate, one decay per head or none | q and k repeated to HV | per head |

Decays of groups are repeated to their channels, and so are gates that FLA takes per channel. The recurrent forms take
HV heads where the chunk forms do. They have no gradient, or no useful one, and are used for calls of one token that
need no gradient.

FLA silently accepts unknown keywords, so every keyword is written out here.
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
    """The operands of the bare rule.

    Attributes:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: log decay [B, T, HV, n].
        b: the erase gate [B, T, HV, ...], or beta [B, T, HV, 1] as both gates, or None.
        w: the write gate [B, T, HV, ...], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor | None
    w: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> Operands:
        """Apply f to each operand that is not None, and return the results as operands."""
        return Operands._make(None if a is None else f(a) for a in self)


def fitted(kind: Family, x: Operands) -> Operands:
    """Return operands in the form of an operation, with heads repeated and gates per channel as it requires.

    GDN-2's kernels multiply its gates with k and v in the dtype of k and v.
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
    """Return the decay and the gates under FLA's names."""
    if kind.name == "gdn2":
        return {"g": x.g, "b": _there(x.b), "w": _there(x.w)}
    g = x.g if kind.by_channel else x.g[..., 0]
    return {"g": g} if x.b is None else {"g": g, "beta": x.b[..., 0]}


def _there(a: Tensor | None) -> Tensor:
    assert a is not None
    return a


def imported(module: str) -> Any:
    """Import a module of FLA, and repair it if kernels are interpreted."""
    found = importlib.import_module(module)
    interpreter.repair_imported(module)
    return found


def chunked(rule: Rule, x: Operands, S: Tensor, cu_seqlens: Tensor | None, host: Tensor | None) -> Any:
    """Compute o [B, T, HV, V] and the final states by the chunk form.

    ``x`` comes from ``fitted``. The boundaries are given on the device and on the host.
    """
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
    """Compute o [B, T, HV, V] and the final states token by token, all in float32, without gradients."""
    kind = rule.kind
    op = getattr(imported(kind.module), kind.recurrent)
    more: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if rule.raw else {}
    if rule.raw and x.b is None:  # GLA's kernels have no l2 norm
        x, more = x._replace(q=l2norm(xp, x.q.float()), k=l2norm(xp, x.k.float())), {}
    gates = _gates(kind, x)
    if kind.name == "gla":
        gates["gk"] = gates.pop("g")
    given = {"q": x.q, "k": x.k, "v": x.v, **gates, "initial_state": S}
    given = {name: a.contiguous() for name, a in given.items()}
    with torch.no_grad():
        return op(**given, scale=rule.scale, output_final_state=True, **more)


def normalised(x: Operands) -> Operands:
    """Return the operands with q and k normalised by FLA's kernel, in float32 and then rounded to their dtype."""
    op = imported("fla.modules.norm.l2norm").l2norm
    return x._replace(q=op(x.q, eps=L2_EPS), k=op(x.k, eps=L2_EPS))
