"""A backend as another package would bring it: the rule token by token for torch tensors, its gradient by autograd.

All it says of itself is what it takes, what it refuses and what it rounds; the harness does the rest.
"""

from __future__ import annotations

import importlib.util
import os

import portable_gdn as pg


class Mine(pg.Backend):
    """What it takes and refuses, and how it computes; its gradients are torch's, and it rounds nothing."""

    name = "mine"
    libraries = ("torch",)

    def unavailable(self):
        return None if importlib.util.find_spec("torch") else "torch is not installed"

    def refuses(self, s):
        if s.conv is not None or s.gate is not None:
            return "it has no convolution and no gates inside"
        if s.has("segment_ids") or s.has("mask"):
            return "it has neither segments nor masks"
        return None

    def run(self, problem):
        import torch

        s, x = problem
        x = {n: a[:, None] if s.step and n in TOKENS else a for n, a in x.items()}
        expand = lambda a: a.float().repeat_interleave(s.HV // s.H, 2)  # noqa: E731
        q, k, v = expand(x["q"]), expand(x["k"]), x["v"].float()
        if s.qk_l2norm:
            q, k = (a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for a in (q, k))
        g = x["g"].float().reshape(*v.shape[:3], -1) if "g" in x else v.new_zeros(*v.shape[:3], 1)
        g = g.repeat_interleave(s.K // g.shape[-1], -1)
        b = x.get("beta", x.get("erase"))
        w = x.get("beta", x.get("write"))
        b = v.new_zeros(*v.shape[:3], 1) if b is None else b.reshape(*v.shape[:3], -1)
        w = v.new_ones(*v.shape[:3], 1) if w is None else w.reshape(*v.shape[:3], -1)
        S = x.get("initial_state")
        S = v.new_zeros(s.N, s.HV, s.K, s.V) if S is None else S.mT if s.state_layout == "vk" else S
        bounds = [int(n) for n in x["cu_seqlens"]] if s.packed else None
        o, final = [], []
        for n in range(s.N):
            row, tokens = (0, range(bounds[n], bounds[n + 1])) if bounds else (n, range(s.T))
            state = S[n]
            for t in tokens:
                kt, e = k[row, t], b[row, t] * k[row, t]
                # FAULT is set by a test that wants to see this backend fail.
                decay = g[row, t].exp() if os.environ.get("MINE_FAULT") is None else g[row, t].exp() * 1.001
                state = decay[..., None] * state
                r = w[row, t] * v[row, t] - (e[..., None, :] @ state)[..., 0, :]
                state = state + kt[..., :, None] * r[..., None, :]
                o.append(s.scale * (q[row, t][..., None, :] @ state)[..., 0, :])
            final.append(state)
        o = torch.stack(o).reshape(v.shape).to(getattr(torch, s.dtype))
        state = torch.stack(final)
        state = state.mT if s.state_layout == "vk" else state
        return pg.Result(o[:, 0] if s.step else o, state if s.output_final_state else None)


TOKENS = ("q", "k", "v", "g", "beta", "erase", "write")
BACKEND = Mine()
