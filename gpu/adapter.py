"""A call on FLA's kernels: it converts operands to FLA's form, and computes what FLA cannot.

| ours | FLA's | note |
|---|---|---|
| q, k [B, T, H, K]; v [B, T, HV, V] | q, k, v | in the inputs' dtype; float32 for precision "highest" |
| g [B, T, HV], [B, T, HV, n] or [B, T, HV, K] | g | float32, natural log; zeros if there is none |
| beta [B, T, HV] | beta | float32 |
| erase [B, T, HV, K], write [B, T, HV, V] | b, w | float32 |
| scale | scale | always given |
| states [N, HV, K, V] | initial_state | float32, K first (state_v_first stays False); always given and returned |
| cu_seqlens | cu_seqlens, cu_seqlens_cpu | without empty sequences; ends at T; on the host for index tables |
| chunk_size | chunk_size | if given |
| gate, mask, conv | | computed before the rule, in float32 (``spec.prologue``) |
| output_norm, z | x, g, weight of ``rms_norm_gated`` or ``rms_norm`` | after the rule (``norm.py``) |
| qk_l2norm | ``l2norm``, or use_qk_l2norm_in_kernel | before the rule, in float32, if operands are float32 |

``operations.py`` chooses FLA's operation. Calls of one token that need no gradient use its recurrent form, and all
other calls its chunk form. ``rule.py`` handles resets, and ``compiled.py`` makes the rule one operation of
torch.compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from ..spec.errors import GdnError
from ..spec.gates import l2norm
from ..spec.problem import Problem, Result, Signature
from ..spec.prologue import gates, masked, prepare, starts, swap_state
from ..spec.torch_tensors import boundaries_as_tensor
from .compiled import one_operation
from .families import family, one_token, operand_dtype, rule_of
from .launching import Settings
from .norm import finished
from .operations import Operands, fitted
from .rule import apply, products

__all__ = ["Ready", "products_of_float32", "ready", "run", "settings_of"]


def settings_of(s: Signature) -> Settings:
    """Return the settings with which a call's kernels are launched. Only NVIDIA's GPUs can choose IEEE products."""
    nvidia = torch.version.hip is None and s.device == "cuda"
    return Settings(s.deterministic, nvidia and s.precision == "highest")


def products_of_float32(s: Signature) -> str:
    """Return the precision of a call's float32 products on this machine in kernels that do not specify one."""
    return products(settings_of(s).ieee)


def run(problem: Problem) -> Result:
    """Compute a call on FLA's kernels."""
    s, x = problem
    like = x["qkv"] if "qkv" in x else x["q"]
    if torch._C._are_functorch_transforms_active():
        raise GdnError(
            "FLA's kernels cannot run under torch.func (grad, vmap, ...); backend 'torch' can, and torch.autograd "
            "differentiates FLA's."
        )
    with torch.autocast(like.device.type, enabled=False):  # autocast would round what must not be rounded
        call = ready(s, x)
        bounds, differentiated = x.get("cu_seqlens"), any(getattr(a, "requires_grad", False) for a in x.values())
        compute = one_operation if torch.compiler.is_compiling() else apply
        recurs = one_token(s) and not (torch.is_grad_enabled() and differentiated)
        rule = rule_of(s, call.raw, *settings_of(s))
        o, state = compute(rule, call.operands, call.S, bounds, call.starts, recurs)
        o = finished(s, x, o)
    return Result(o[:, 0] if s.step else o, swap_state(xp, s, state) if s.output_final_state else None, call.conv_state)


class Ready(NamedTuple):
    """The operands for FLA, the states S [N, HV, K, V], and whether q and k must still be normalised.

    Operands are as in ``spec.prologue.Prepared``, in the form that the operation takes.
    """

    operands: Operands
    raw: bool
    S: Tensor
    starts: Tensor | None
    conv_state: Tensor | None


def ready(s: Signature, x: dict[str, Any]) -> Ready:
    """Return the operands for FLA. Without a convolution, 16-bit q, k and v are the caller's tensors, not copies."""
    x = dict(boundaries_as_tensor(x))
    dtype = getattr(torch, operand_dtype(s))
    conv_state, raw = None, False
    if s.conv is None:
        q, k, v = (masked(xp, s, x, name).to(dtype) for name in "qkv")
        g, b, w = gates(xp, s, x)
        S = swap_state(xp, s, x["initial_state"]) if s.has("initial_state") else None
        begin = starts(xp, s, x)
        if s.qk_l2norm and dtype == torch.float32:
            q, k = l2norm(xp, q), l2norm(xp, k)
        raw = s.qk_l2norm and dtype != torch.float32
    else:
        q, k, v, g, b, w, S, begin, conv_state = prepare(xp, s, x)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if g is None:
        g = v.new_zeros((s.B, s.T, s.HV, 1), dtype=torch.float32)
    if S is None:
        S = v.new_zeros((s.N, s.HV, s.K, s.V), dtype=torch.float32)
    operands = Operands(q, k, v, g, b, None if s.has("beta") else w)
    return Ready(fitted(family(s), operands), raw, S, begin, conv_state)
