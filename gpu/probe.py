"""The seven stages of a call, from the values that FLA's functions pass to each other, in our names and shapes.

| stage | FLA |
|---|---|
| decay | ``chunk_local_cumsum``, which is in base 2 |
| scores | no operation stores both, so the kernels that compute Akk and Aqk are called, see below |
| inverse | A or Akk of the ``*_fwd_intra`` functions |
| wy | their u and w |
| state | h, the states at the chunks' starts, and the final one |
| delta | v_new |
| output | o |

Aqk: gdn and simple_gla never store it; ``chunk_fwd_o`` returns it if the values are the identity and the states 0.
Akk: for gdn ``chunk_scaled_dot_kkt_fwd`` returns it. The kernels of kda and gdn2 solve at once, and return it in place
of Aqk if the erasing keys are passed as queries. Every part has the dtype in which FLA stores it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec.errors import GdnError, bad
from ..spec.problem import Problem, Signature
from ..spec.stages import RESET
from .adapter import ready
from .families import chunk_size, family, may_reset
from .operations import Operands, imported, normalised

__all__ = ["probe"]

Stages = dict[str, tuple[Any, ...]]


def probe(problem: Problem) -> Stages:
    """Return the stages of every chunk of a call, in the form of ``spec.probe``.

    Raises:
        GdnError: sequences are packed or segmented, or some gates are resets, which FLA does not count.
    """
    s, x = problem
    for name in ("cu_seqlens", "segment_ids"):
        if s.has(name):
            raise bad(name, "given", "be None where stages are probed: chunks of packed sequences differ in length")
    with torch.no_grad(), torch.autocast(x["qkv" if "qkv" in x else "q"].device.type, enabled=False):
        call = ready(s, x)
        operands = normalised(call.operands) if call.raw else call.operands
        if may_reset(s) and bool((operands.g < RESET).any()):
            raise GdnError(f"g holds resets (below {RESET:g}), of which FLA's stages know nothing; other backends' do.")
        return _stages(s, operands.map(Tensor.contiguous), call.S.contiguous())


def _stages(s: Signature, x: Operands, S: Tensor) -> Stages:
    kind, C = family(s), chunk_size(s)
    ops = imported("fla.ops.utils")
    base2 = 1 / math.log(2.0)
    g = x.g if kind.by_channel else x.g[..., 0].contiguous()
    G = ops.chunk_local_cumsum(g, chunk_size=C, scale=base2)
    compute = {"gdn": _gdn, "kda": _kda, "gdn2": _gdn2, "gla": _gla, "simple_gla": _simple_gla}[kind.name]
    (Akk, Aqk), T, (U, W), (h, last), Vn, o = compute(s, x, S, G, C)

    def chunks(a: Tensor | None, width: int = 0) -> Tensor | None:
        """Reshape [B, T, HV, D] to [B, chunks, HV, C, D], padded with zeros."""
        if a is None:
            return None
        missing = -s.T % C
        a = torch.nn.functional.pad(a, (0, 0, 0, 0, 0, missing))
        return a.unflatten(1, (-1, C)).movedim(2, 3)

    G = (G if kind.by_channel else G[..., None]) / base2
    sums = chunks(G[..., :: G.shape[-1] // max(s.groups, 1)])
    assert sums is not None
    after = torch.cat([h[:, 1:], last[:, None].to(h.dtype)], 1)
    return {
        "decay": (sums, torch.zeros_like(sums)),
        "scores": (chunks(Akk), chunks(Aqk)),
        "inverse": (chunks(T),),
        "wy": (chunks(U), chunks(W)),
        "state": (h, after),
        "delta": (chunks(Vn),),
        "output": (chunks(o),),
    }


def _eye(like: Tensor, C: int) -> Tensor:
    """Return the identity matrix of every chunk as values [B, T, HV, C]."""
    rows = torch.arange(like.shape[1], device=like.device) % C
    eye = torch.nn.functional.one_hot(rows, C).to(like.dtype)
    return eye[None, :, None].expand(*like.shape[:3], C).contiguous()


def _lower(A: Tensor, C: int, strict: bool = False) -> Tensor:
    """Keep the scores [B, T, HV, C] of rows with earlier columns of their chunk, and set the others to 0.

    FLA neither writes nor reads those above the diagonal.
    """
    rows, columns = (torch.arange(n, device=A.device) for n in (A.shape[1], C))
    rows = (rows % C)[:, None, None]
    return torch.where(rows > columns if strict else rows >= columns, A, torch.zeros_like(A))


def _gdn(s: Signature, x: Operands, S: Tensor, G: Tensor, C: int) -> Any:
    assert x.b is not None
    beta = x.b[..., 0].contiguous()
    intra = imported("fla.ops.gated_delta_rule.chunk_fwd").chunk_gated_delta_rule_fwd_intra
    W, U, T = intra(k=x.k, v=x.v, g=G, beta=beta, chunk_size=C)
    Akk = imported("fla.ops.common.chunk_scaled_dot_kkt").chunk_scaled_dot_kkt_fwd(
        k=x.k, g=G, beta=beta, chunk_size=C, output_dtype=torch.float32
    )
    fwd_h = imported("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_fwd_h
    h, Vn, last = fwd_h(k=x.k, w=W, u=U, g=G, initial_state=S, output_final_state=True, chunk_size=C)
    Aqk, o = _by_head(s, x, Vn, h, G, C)
    return (Akk, Aqk), T, (U, W), (h, last), Vn, o


def _by_head(s: Signature, x: Operands, Vn: Tensor, h: Tensor, G: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """Compute Aqk and o."""
    fwd_o = imported("fla.ops.common.chunk_o").chunk_fwd_o
    none = h.new_zeros((*h.shape[:-1], C))
    Aqk = fwd_o(q=x.q, k=x.k, v=_eye(Vn, C), h=none, g=G, scale=s.scale, chunk_size=C)
    return Aqk, fwd_o(q=x.q, k=x.k, v=Vn, h=h, g=G, scale=s.scale, chunk_size=C)


def _kda(s: Signature, x: Operands, S: Tensor, G: Tensor, C: int) -> Any:
    assert x.b is not None
    intra = imported("fla.ops.kda.chunk_intra").chunk_kda_fwd_intra
    given = {"k": x.k, "v": x.v, "gk": G, "beta": x.b[..., 0].contiguous(), "chunk_size": C, "safe_gate": _safe(s)}
    W, U, _, decayed, Aqk, T = intra(q=x.q, scale=s.scale, **given)
    pairs = intra(q=x.k, scale=1.0, **given)[4]
    Akk = (x.b * _lower(pairs, C, strict=True)).to(pairs.dtype)
    return _by_channel(s, x, S, G, C, _Solved((Akk, Aqk), T, (U, W), decayed))


def _gdn2(s: Signature, x: Operands, S: Tensor, G: Tensor, C: int) -> Any:
    assert x.b is not None
    intra = imported("fla.ops.gdn2.chunk_intra").chunk_gdn2_fwd_intra
    given = {"k": x.k, "v": x.v, "gk": G, "b": x.b, "w_gate": x.w, "chunk_size": C, "safe_gate": _safe(s)}
    W, U, _, decayed, Aqk, T = intra(q=x.q, scale=s.scale, **given)
    Akk = _lower(intra(q=x.b * x.k, scale=1.0, **given)[4], C, strict=True)
    return _by_channel(s, x, S, G, C, _Solved((Akk, Aqk), T, (U, W), decayed))


def _safe(s: Signature) -> bool:
    return s.gate is not None and s.gate.lower_bound is not None


class _Solved(NamedTuple):
    """The results that FLA computes within chunks with decays per channel, in FLA's layout, tokens before heads.

    Attributes:
        A: Akk and Aqk.
        T: the inverse.
        wy: U and W.
        decayed: the keys times their decay to the chunk's end.
    """

    A: tuple[Tensor, Tensor]
    T: Tensor
    wy: tuple[Tensor, Tensor]
    decayed: Tensor


def _by_channel(s: Signature, x: Operands, S: Tensor, G: Tensor, C: int, solved: _Solved) -> Any:
    """Compute the stages that follow the decayed keys; KDA and GDN-2 share these steps."""
    A, T, wy, decayed = solved
    fwd_h = imported("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_fwd_h
    h, Vn, last = fwd_h(k=decayed, w=wy[1], u=wy[0], gk=G, initial_state=S, output_final_state=True, chunk_size=C)
    fwd_o = imported("fla.ops.gla.chunk").chunk_gla_fwd_o_gk
    o = fwd_o(q=x.q, v=Vn, g=G, A=A[1], h=h, scale=s.scale, chunk_size=C)
    return (A[0], _lower(A[1], C)), T, wy, (h, last), Vn, o


def _gla(s: Signature, x: Operands, S: Tensor, G: Tensor, C: int) -> Any:
    ops = imported("fla.ops.gla.chunk")
    fwd_h = imported("fla.ops.common.chunk_h").chunk_fwd_h
    h, last = fwd_h(k=x.k, v=x.v, gk=G, h0=S, output_final_state=True, chunk_size=C)
    Aqk = ops.chunk_gla_fwd_intra_gk(q=x.q, k=x.k, g=G, scale=s.scale, chunk_size=C)
    o = ops.chunk_gla_fwd_o_gk(q=x.q, v=x.v, g=G, A=Aqk, h=h, scale=s.scale, chunk_size=C)
    return (None, _lower(Aqk, C)), None, (x.v, None), (h, last), x.v, o


def _simple_gla(s: Signature, x: Operands, S: Tensor, G: Tensor, C: int) -> Any:
    fwd_h = imported("fla.ops.common.chunk_h").chunk_fwd_h
    h, last = fwd_h(k=x.k, v=x.v, g=G, h0=S, output_final_state=True, chunk_size=C)
    Aqk, o = _by_head(s, x, x.v, h, G, C)
    return (None, Aqk), None, (x.v, None), (h, last), x.v, o
