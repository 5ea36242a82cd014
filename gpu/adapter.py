"""A call on FLA's kernels: operands as FLA wants them, and around what FLA cannot do.

| ours | FLA's | note |
|---|---|---|
| q, k [B, T, H, K] | q, k | in the inputs' dtype where nothing before the rule needed float32 |
| v [B, T, HV, V] | v | likewise |
| g [B, T, HV] or [B, T, HV, K] | g | float32, natural log; zeros for DeltaNet; no reset in it |
| beta [B, T, HV] | beta | float32 |
| scale | scale | always given |
| states [N, HV, K, V] | initial_state | float32, K first: state_v_first stays False; always given and asked for |
| cu_seqlens | cu_seqlens, cu_seqlens_cpu | without empty sequences; ends at T; on the host for index tables |
| chunk_size | chunk_size | where given |
| qk_l2norm, gate, mask, conv | | done before, in float32 (``spec.prologue``) |

Resets: a sequence is cut where a gate is one (``pieces.py``). Where gates are one a head, heads are laid end to end and
all pieces run at once. Where they are one a channel, the piece behind a reset needs what the one before it left in the
other channels: pieces of a sequence run in turn, exact and as slow as there are pieces, and no more than a few.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

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
from ..spec.variants import VARIANTS
from . import interpreter
from .pieces import Pieces, cut_heads_apart, cut_in_turn, whole

__all__ = ["CHUNK", "MOST_TURNS", "operand_dtype", "products_of_float32", "run"]

CHUNK = 64  # FLA's own
LONGEST_FALL = -1419.0  # of gates in a chunk: 2^11 in base 2, in which FLA sums, and float32 has 2^-12 between numbers

MOST_TURNS = 16  # pieces of one sequence that run in turn; more would be a recurrence, a kernel launch a token
MOST_BLOCKS = 65535  # of a launch along the axis on which FLA puts sequences times heads


def operand_dtype(s: Signature) -> str:
    """The dtype in which q, k and v enter FLA's kernels: float32 where they come out of a norm or a convolution."""
    return "float32" if s.qk_l2norm or s.conv is not None else s.dtype


def products_of_float32() -> str:
    """What Triton makes of float32 operands of a product here, if the kernel does not say."""
    if interpreter.chosen():
        return "float32"
    if not torch.cuda.is_available():
        return "tf32"  # XPU
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
        return "tf32" if arch.startswith("gfx942") else "float32"
    return "tf32" if torch.cuda.get_device_capability() >= (8, 0) else "float32"


def run(problem: Problem) -> Result:
    """Compute a call on FLA's kernels."""
    s, x = problem
    like = x["qkv"] if "qkv" in x else x["q"]
    if torch._C._are_functorch_transforms_active():
        raise GdnError(
            "FLA's kernels cannot run under torch.func (grad, vmap, ...); backend 'torch' can, and torch.autograd "
            "differentiates FLA's."
        )
    with torch.autocast(like.device.type, enabled=False):  # it would round what must not be rounded
        bounds = x.get("cu_seqlens")
        p = prepare(xp, s, boundaries_as_tensor(x))
        S = p.v.new_zeros((s.N, s.HV, s.K, s.V)) if p.S is None else p.S
        dtype = getattr(torch, operand_dtype(s))
        operands = [p.q.to(dtype), p.k.to(dtype), p.v.to(dtype), p.g, p.b[..., 0]]
        sequences = place(s.B, s.T, *(None if a is None else on_host(a) for a in (bounds, p.starts)))
        plain = bounds is None and p.starts is None
        o, state = _rule(s, operands, S, sequences, plain)
        if o.requires_grad:
            o, state = _Once.apply(o, state)
        o = finish(xp, s, x, o)
    return Result(o[:, 0] if s.step else o, swap_state(xp, s, state) if s.output_final_state else None, p.conv_state)


class _Once(torch.autograd.Function):
    """Nothing, except that FLA's gradient, which torch cannot see into, is not taken for one that can be derived."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return o.view_as(o), state.view_as(state)

    @staticmethod
    def backward(ctx: Any, dO: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            raise GdnError("create_graph is True; FLA's kernels have no second derivative, and backend 'torch' has.")
        return dO, dS


def _may_reset(s: Signature) -> bool:
    """Whether a gate of this call can be a reset; where none can, none is looked for (it would wait for the device)."""
    return s.has("g") and (s.gate is None or s.gate.lower_bound is None)


def _check_falls(g: Tensor, size: int, bounds: np.ndarray | None) -> None:
    """Refuse gates [1 or B, T, HV, n] whose sum over a chunk of ``size`` has too few digits left."""
    bounds = np.array([0, g.shape[1]]) if bounds is None else bounds
    cuts = np.concatenate([*(np.arange(b, e, size) for b, e in pairwise(bounds)), bounds[-1:]])
    sums = torch.nn.functional.pad(g.detach().double().cumsum(1), (0, 0, 0, 0, 1, 0))[:, _index(cuts, g)]
    lowest = float((sums[:, 1:] - sums[:, :-1]).min())
    if lowest < LONGEST_FALL:
        raise GdnError(
            f"g falls by {-lowest:.0f} within a chunk of {size}; FLA's kernels sum it in float32, which leaves later "
            f"gates too few digits beyond {-LONGEST_FALL:.0f}, and backend 'torch' takes any."
        )


def _rule(s: Signature, x: list[Tensor], S: Tensor, sequences: Placed, plain: bool) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final states [N, HV, K, V]; ``plain`` if sequences are whole rows."""
    reset = x[3] < RESET if _may_reset(s) else None
    if reset is None or not bool(reset.any()):
        if plain:
            return _kernel(s, x, S, None)
        o, after = _launch(s, [a.flatten(0, 1) for a in x], _states(S, sequences), whole(sequences))
        return o.unflatten(0, (s.B, s.T)), after[_index(sequences.last, S)]
    flat = [a.flatten(0, 1) for a in [*x[:3], torch.where(reset, 0.0, x[3]), x[4]]]
    compute = _heads_apart if s.groups == 1 else _in_turn
    o, state = compute(s, flat, S, sequences, reset.flatten(0, 1))
    return o.unflatten(0, (s.B, s.T)), state


def _heads_apart(
    s: Signature, flat: list[Tensor], S: Tensor, sequences: Placed, reset: Tensor
) -> tuple[Tensor, Tensor]:
    """Every head a sequence of its own, cut at its own resets."""
    cut, last = cut_heads_apart(sequences, on_host(reset[..., 0]))
    line = [a.repeat_interleave(s.HV // a.shape[1], 1).movedim(1, 0).flatten(0, 1)[:, None] for a in flat]
    states = S[_index(sequences.state, S)].flatten(0, 1)[:, None]
    o, after = _launch(s, line, _states(states, cut), cut)
    final = after[_index(last, S)].unflatten(0, (-1, s.HV))[:, :, 0]
    return o[:, 0].unflatten(0, (s.HV, -1)).movedim(0, 1).contiguous(), final[_index(sequences.last, S)]


def _in_turn(s: Signature, flat: list[Tensor], S: Tensor, sequences: Placed, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of a sequence one after the other, those of different sequences together."""
    turns = cut_in_turn(sequences, on_host(reset.flatten(1).any(-1)))
    if len(turns) > MOST_TURNS:
        raise GdnError(
            f"g holds resets (below {RESET:g}) of single channels at {len(turns) - 1} tokens of a sequence; FLA's "
            f"kernels know none, and are run piece by piece for at most {MOST_TURNS - 1}; backend 'torch' takes any."
        )
    states, o = _states(S, sequences), flat[2].new_zeros(flat[2].shape)
    for turn in turns:
        which, lost = _index(turn.state, S), reset[_index(turn.begin, S)][..., None]
        before = torch.where(lost, 0.0, states[which])
        new, after = _launch(s, flat, before, turn)
        o, states = o + new, states.index_copy(0, which, after)
    return o, states[_index(sequences.last, S)]


def _index(a: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(a, device=like.device)


def _states(S: Tensor, pieces: Placed | Pieces) -> Tensor:
    """The state from which each piece starts."""
    states = S[_index(pieces.state, S)]
    return torch.where(_index(pieces.fresh, S)[:, None, None, None], 0.0, states) if pieces.fresh.any() else states


def _launch(s: Signature, flat: list[Tensor], states: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Pieces of rows laid end to end: o like v, 0 at tokens of none, and the state behind each piece.

    FLA gets neither empty pieces, whose states pass by, nor tokens of no piece.
    """
    live = np.flatnonzero(pieces.end > pieces.begin)
    v = flat[2]
    o, after = v.new_zeros(v.shape), states
    most = max(1, MOST_BLOCKS // v.shape[1])
    for some in (live[i : i + most] for i in range(0, len(live), most)):
        begin, end = pieces.begin[some], pieces.end[some]
        bounds = np.concatenate([[0], np.cumsum(end - begin)])
        if bounds[-1] == len(v) and np.array_equal(begin, bounds[:-1]):  # they cover the rows in order
            out, new = _kernel(s, [a[None] for a in flat], states[_index(some, v)], bounds)
            o = out[0]
        else:
            tokens = _index(np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)]), v)
            out, new = _kernel(s, [a[tokens][None] for a in flat], states[_index(some, v)], bounds)
            o = o.index_copy(0, tokens, out[0])
        after = new if len(some) == len(states) else after.index_copy(0, _index(some, v), new)
    return o, after


def _kernel(s: Signature, operands: list[Tensor], S: Tensor, bounds: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """One call of FLA. Its keywords are written out: it takes unknown ones without a word."""
    q, k, v, g, beta = (a.contiguous() for a in operands)
    more: dict[str, Any] = {} if s.chunk_size is None else {"chunk_size": s.chunk_size}
    if bounds is not None:
        host = torch.as_tensor(bounds, dtype=torch.int64)
        more |= {"cu_seqlens": host.to(q.device), "cu_seqlens_cpu": host}
    if s.has("g") and q.dtype == torch.float32 and products_of_float32() == "float32":  # else products round more
        _check_falls(g, s.chunk_size or CHUNK, bounds)
    if s.variant == VARIANTS["KDA"]:
        from fla.ops.kda import chunk_kda as op
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

        g = g[..., 0]
    interpreter.repair_imported(op.__module__)
    return op(q, k, v, g=g, beta=beta, scale=s.scale, initial_state=S.contiguous(), output_final_state=True, **more)
