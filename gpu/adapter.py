"""A call on FLA's kernels: operands as FLA wants them, and around what FLA cannot do.

| ours | FLA's | note |
|---|---|---|
| q, k [B, T, H, K] | q, k | in the inputs' dtype where nothing before the rule needed float32 |
| v [B, T, HV, V] | v | likewise |
| g [B, T, HV] or [B, T, HV, K] | g | float32, natural log; no reset in it |
| beta [B, T, HV] | beta | float32 |
| states [N, HV, K, V] | initial_state | float32, K first: state_v_first stays False |
| cu_seqlens | cu_seqlens | no empty sequence in it; ends at T |

FLA sums gates over a chunk, and a gate of -inf makes NaN of it. So sequences are cut at every token that holds a
reset: the piece behind it starts from the state before, with the heads or channels that were reset set to 0, and the
gate there becomes 0. Pieces of different sequences run together. That is exact, and as slow as there are pieces.
"""

from __future__ import annotations

from functools import cache

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from ..spec.errors import GdnError
from ..spec.problem import Problem, Result, Signature
from ..spec.prologue import finish, prepare, swap_state
from ..spec.sequences import Placed, place
from ..spec.stages import RESET
from ..spec.torch_tensors import boundaries_as_tensor, on_host
from ..spec.variants import VARIANTS, Variant
from . import interpreter

__all__ = ["MOST_PIECES", "operand_dtype", "run"]

MOST_PIECES = 16  # of one sequence, more of which would be a recurrence, a kernel launch a token


def operand_dtype(s: Signature) -> str:
    """The dtype in which q, k and v enter FLA's kernels: float32 where they come out of a norm or a convolution."""
    return "float32" if s.qk_l2norm or s.conv is not None else s.dtype


def run(problem: Problem) -> Result:
    """Compute a call on FLA's kernels."""
    s, x = problem
    bounds = x.get("cu_seqlens")
    p = prepare(xp, s, boundaries_as_tensor(x))
    S = p.v.new_zeros((s.N, s.HV, s.K, s.V)) if p.S is None else p.S
    dtype = getattr(torch, operand_dtype(s))
    operands = [p.q.to(dtype), p.k.to(dtype), p.v.to(dtype), p.g, p.b[..., 0]]
    plain = bounds is None and p.starts is None
    sequences = place(s.B, s.T, *(None if a is None else on_host(a) for a in (bounds, p.starts)))
    o, state = _by_pieces(s, operands, S, sequences, plain)
    o = finish(xp, s, x, o)
    return Result(o[:, 0] if s.step else o, swap_state(xp, s, state) if s.output_final_state else None, p.conv_state)


def _by_pieces(
    s: Signature, operands: list[Tensor], S: Tensor, sequences: Placed, plain: bool
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] float32 or the inputs' dtype, and the final states; ``plain`` if sequences are whole rows."""
    device, B, T = S.device, s.B, s.T
    index = lambda a: torch.as_tensor(a, device=device)  # noqa: E731
    g = operands[3]
    reset = g < RESET
    at = on_host(reset.flatten(2).any(-1)).reshape(-1)
    if plain and not at.any():
        return _kernel(s, operands, S, None)
    cuts = [
        np.concatenate([[b], b + np.flatnonzero(at[b:e]), [e]]).astype(np.int64)
        for b, e in zip(sequences.begin, sequences.end, strict=True)
    ]
    cuts = [np.concatenate([c[:1], c[1:-1][c[1:-1] > c[0]], c[-1:]]) for c in cuts]  # a first token needs no cut
    most = max((len(c) - 1 for c in cuts), default=0)
    if most > MOST_PIECES:
        raise GdnError(
            f"g holds resets (below {RESET:g}) at {most - 1} tokens of a sequence; backend 'fla' cuts sequences there, "
            f"and takes at most {MOST_PIECES - 1}; backend 'torch' takes any number."
        )
    operands[3] = torch.where(reset, torch.zeros_like(g), g)
    flat = [a.flatten(0, 1) for a in operands]
    keep = (~reset).flatten(0, 1).to(S.dtype)  # [B T, HV] or [B T, HV, K or 1]
    fresh = index(sequences.fresh)[:, None, None, None]
    states = S[index(sequences.state)]
    states = torch.where(fresh, torch.zeros_like(states), states)
    o = flat[2].new_zeros((B * T, s.HV, s.V))
    for round_ in range(most):
        here = [i for i, c in enumerate(cuts) if round_ < len(c) - 1 and c[round_] < c[round_ + 1]]
        if not here:
            continue
        lengths = [cuts[i][round_ + 1] - cuts[i][round_] for i in here]
        tokens = index(np.concatenate([np.arange(cuts[i][round_], cuts[i][round_ + 1]) for i in here]))
        chosen = index(np.array(here))
        first = keep[index(np.array([cuts[i][round_] for i in here]))]
        first = first.reshape(len(here), s.HV, -1, 1)
        before = torch.where(first == 0, torch.zeros_like(states[chosen]), states[chosen])
        bounds = torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int64, device=device)
        out, after = _kernel(s, [a[tokens][None] for a in flat], before, bounds)
        o = o.index_copy(0, tokens, out[0].to(o.dtype))
        states = states.index_copy(0, chosen, after)
    return o.unflatten(0, (B, T)), states[index(sequences.last)]


def _kernel(s: Signature, operands: list[Tensor], S: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """One call of FLA. Its keywords are written out: it takes unknown ones without a word."""
    q, k, v, g, beta = (a.contiguous() for a in operands)
    more = {} if s.chunk_size is None else {"chunk_size": s.chunk_size}
    if s.variant == VARIANTS["KDA"]:
        from fla.ops.kda import chunk_kda as op
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

        g = g[..., 0]
    _repair(s.variant)
    return op(
        q, k, v, g=g, beta=beta, scale=s.scale, initial_state=S.contiguous(), output_final_state=True,
        cu_seqlens=bounds, **more,
    )  # fmt: skip


@cache
def _repair(variant: Variant) -> None:
    """Once for each of FLA's operations, which are imported when they are first called."""
    if interpreter.chosen():
        interpreter.repair_gather()
