"""What FLA takes without a word, or reads out of bounds for: refused in a sentence, and nothing is launched."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")):
    pytest.skip("FLA is not installed", allow_module_level=True)

START = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"
os.environ["PORTABLE_GDN_BACKEND"] = "fla-interpret"
import torch
import portable_gdn as pg
from portable_gdn import ops
from portable_gdn.gpu import rule
launched = []
for form in ("chunked", "recurrent"):
    def counted(*a, op=getattr(rule, form)):
        launched.append(op.__name__)
        return op(*a)
    setattr(rule, form, counted)
torch.manual_seed(0)
T, H, HV, K, V = 8, 2, 4, 16, 24
q, k, v = torch.randn(1, T, H, K), torch.randn(1, T, H, K), torch.randn(1, T, HV, V)
k = torch.nn.functional.normalize(k, dim=-1)
g, beta = -torch.rand(1, T, HV), torch.rand(1, T, HV)
gk, S = -torch.rand(1, T, HV, K), torch.randn(1, HV, K, V)
gdn = lambda **more: ops.chunk_gated_delta_rule(**{"q": q, "k": k, "v": v, "g": g, "beta": beta, **more})
kda = lambda **more: ops.chunk_kda(**{"q": q, "k": k, "v": v, "g": gk, "beta": beta, **more})
own = lambda **more: pg.gated_delta_rule(**{"q": q, "k": k, "v": v, "g": g, "beta": beta, **more})
step = lambda **more: pg.gated_delta_rule_step(
    **{"q": q[:, 0], "k": k[:, 0], "v": v[:, 0], "g": g[:, 0], "beta": beta[:, 0], "state": S, **more})
nan = float("nan")
"""

#: (call, words of the sentence)
REFUSED = [
    ("gdn(use_qk_l2norm=True)", "use_qk_l2norm"),
    ("kda(head_first=True)", "head_first"),
    ("ops.fused_recurrent_kda(q, k, v, gk, beta, head_first=True)", "head_first"),
    ("gdn(A_log=torch.zeros(HV))", "A_log"),
    ("kda(dt_bias=torch.zeros(HV * K))", "dt_bias"),
    ("ops.fused_recurrent_gated_delta_rule(q, k, v, g, beta)", "gk"),
    ("gdn(k=k[..., :8])", "k is of shape [1, 8, 2, 8]"),
    ("ops.fused_recurrent_kda(q, k[..., :8], v, gk, beta)", "k is of shape [1, 8, 2, 8]"),
    ("gdn(g=g[..., :H])", "g is of shape [1, 8, 2]"),
    ("gdn(beta=beta[..., :H])", "beta is of shape [1, 8, 2]"),
    ("kda(g=gk[:, :, :H])", "g is of shape [1, 8, 2, 16]"),
    ("step(g=g[:, 0, :H])", "g is of shape [1, 2]"),
    ("ops.fused_recurrent_gated_delta_rule(q, k, v[:, :, :3], g[..., :3], beta=beta[..., :3])", "v is of 3 heads"),
    ("gdn(v=v[:, :5])", "v is of shape [1, 5, 4, 24]"),
    ("own(v=v[:, :5], backend='fla-interpret')", "v is of shape [1, 5, 4, 24]"),
    ("gdn(cu_seqlens=torch.tensor([0, 5, 9]))", "cu_seqlens is ending at 9"),
    ("kda(cu_seqlens=torch.tensor([0, 5]))", "cu_seqlens is ending at 5"),
    ("gdn(cu_seqlens=torch.tensor([0, 6, 5, 8]))", "cu_seqlens is decreasing from 6 to 5"),
    ("gdn(cu_seqlens=torch.tensor([1, 5, 8]))", "cu_seqlens is starting at 1"),
    ("own(cu_seqlens=[0, 4, 4.5, 8])", "cu_seqlens"),
    ("gdn(q=q.repeat(2, 1, 1, 1), k=k.repeat(2, 1, 1, 1), v=v.repeat(2, 1, 1, 1), g=g.repeat(2, 1, 1), "
     "beta=beta.repeat(2, 1, 1), cu_seqlens=torch.tensor([0, 8]))", "cu_seqlens is given for B = 2"),
    ("gdn(initial_state=S.repeat(2, 1, 1, 1))", "initial_state is of shape [2, 4, 16, 24]"),
    ("gdn(initial_state=S.mT.contiguous())", "initial_state is of shape [1, 4, 24, 16] (it looks like"),
    ("own(initial_state=S.mT.contiguous())", "it looks like state_layout='vk'"),
    ("own(initial_state=S.bfloat16())", "initial_state is of dtype bfloat16"),
    ("step(state=S.mT.contiguous())", "state is of shape [1, 4, 24, 16]"),
    ("own(g=-g, check_values=True)", "g"),
    ("own(beta=3 * beta.round() + 3, check_values=True)", "beta"),
    ("own(q=torch.full_like(q, nan), check_values=True)", "q"),
    ("gdn(q=q.double(), k=k.double(), v=v.double())", "q is of dtype float64"),
    ("gdn(q=q.bfloat16(), k=k.bfloat16())", "v is of dtype float32; it must have the dtype of q, bfloat16"),
    ("gdn(v=v.half())", "v is of dtype float16"),
    ("gdn(beta=None)", "beta"),
    ("kda(g=g)", "g"),
    ("kda(g=None)", "g"),
    ("ops.chunk_gdn2(q, k, v, gk, beta, torch.rand(1, T, HV, V))", "b"),
    ("ops.chunk_gdn2(q, k, v, gk, torch.rand(1, T, HV, K), torch.rand(1, T, HV, K))", "w"),
    ("kda(lower_bound=-6.0, use_gate_in_kernel=True, A_log=torch.zeros(HV))", "lower_bound"),
    ("kda(safe_gate=True, use_gate_in_kernel=True, A_log=torch.zeros(HV))", "lower_bound"),
    ("gdn(chunk_size=48)", "chunk_size is 48"),
    ("kda(chunk_size=16)", "take chunks of 32, 64, and chunk_size is 16"),
    ("ops.chunk_gdn2(q, k, v, gk, torch.rand(1, T, HV, K), torch.rand(1, T, HV, V), chunk_size=32)", "chunk"),
    ("own(q=torch.randn(1, T, H, 320), k=torch.randn(1, T, H, 320))", "key dims up to 256, and K is 320"),
    ("own(scale=nan)", "scale is nan"),
    ("own(q=q.to('meta'))", "k is on cpu; it must be on meta, where q is."),
    ("gdn(state_v_first=True, transpose_state_layout=False)", "transpose_state_layout"),
    ("gdn(cp_context=object())", "cp_context"),
]  # fmt: skip

#: What FLA gets wrong, or has no answer for, and is prepared away: call, what torch says.
PREPARED = [
    "gdn(g=torch.where(g > -0.1, -float('inf'), g))",
    "gdn(g=50 * g)",
    "kda(g=torch.where(gk < -0.99, -float('inf'), gk))",
    "kda(g=20 * gk, safe_gate=True)",
    "gdn(initial_state=S.mT.contiguous(), state_v_first=True, output_final_state=True)",
    "gdn(cu_seqlens=torch.tensor([0, 0, 3, 3, 8]), initial_state=S.repeat(4, 1, 1, 1), output_final_state=True)",
    "gdn(q=q[:, :0], k=k[:, :0], v=v[:, :0], g=g[:, :0], beta=beta[:, :0])",
    "kda(beta=beta.double(), g=gk.half().float())",
    "gdn(q=q.mT.contiguous().mT, v=v.transpose(1, 2).contiguous().transpose(1, 2))",
]

REFUSE = """
found = []
for call in json.loads(os.environ["CALLS"]):
    launched.clear()
    try:
        eval(call)
        found.append(["not refused", launched[:]])
    except pg.GdnError as error:
        found.append([str(error), launched[:]])
print(json.dumps(found))
"""

PREPARE = """
for call in json.loads(os.environ["CALLS"]):
    os.environ["PORTABLE_GDN_BACKEND"] = "fla-interpret"
    got = eval(call)
    os.environ["PORTABLE_GDN_BACKEND"] = "torch"
    for a, b in zip(got, eval(call), strict=True):
        assert (a is None) == (b is None), call
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, call
            assert a.isfinite().all() and (a - b).norm() <= 1e-5 * b.norm(), (call, (a - b).norm() / b.norm())
assert launched
"""


def python(code, calls):
    env = {**os.environ, "CALLS": json.dumps(calls)}
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_refused_and_nothing_is_launched():
    found = json.loads(python(REFUSE, [call for call, _ in REFUSED]).splitlines()[-1])
    wrong = []
    for (call, words), (sentence, launched) in zip(REFUSED, found, strict=True):
        if words not in sentence or launched or not sentence.endswith((".", "?")):
            wrong.append((call, words, sentence, launched))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
def test_what_can_be_prepared_away_is():
    python(PREPARE, PREPARED)
