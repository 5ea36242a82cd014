"""The torch backend's computation: a loop over chunks, with its own gradient.

Sequences of a plain batch advance together, chunk by chunk, on views of the caller's tensors. Packed and segmented
sequences are sorted by length, longest first, so that in each round the sequences that still have tokens are the
leading rows of one batch. Many short sequences then need only a few rounds, and none shares a product with another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from ..spec import chunkwise
from ..spec.chunkwise import ChunkOperands
from ..spec.probe import probe as spec_probe
from ..spec.problem import Problem, Result, Signature
from ..spec.prologue import Prepared, finish, prepare, swap_state
from ..spec.recurrent import one_token
from ..spec.sequences import place
from ..spec.stages import Algebra
from ..spec.torch_tensors import boundaries_as_tensor, float32_products, on_host, register_gradient

__all__ = ["probe", "run"]


def run(problem: Problem, size: int) -> Result:
    """Compute a call in chunks of ``size`` tokens."""
    with float32_products(_like(problem.operands).device.type):
        return _run(problem, size)


def _run(problem: Problem, size: int) -> Result:
    s, x = problem
    bounds = x.get("cu_seqlens")  # the loop needs them on the host, where they stay if the caller had them there
    p = prepare(xp, s, boundaries_as_tensor(x))
    S = p.v.new_zeros((s.N, s.HV, s.K, s.V)) if p.S is None else p.S
    if s.step or (s.T == 1 and not s.packed):  # one token needs no chunk, and no segment starts there
        o, state = _step(s, p, S)
    else:
        o, state = _rule(s, p, S, bounds, size)
    return Result(finish(xp, s, x, o), swap_state(xp, s, state) if s.output_final_state else None, p.conv_state)


def probe(problem: Problem, size: int) -> dict[str, tuple[Any, ...]]:
    """Return the stages that ``run`` computes, chunk by chunk."""
    s, x = problem
    with torch.no_grad(), float32_products(_like(x).device.type):

        def chunk(part: ChunkOperands) -> Any:
            return chunkwise.stage_chunk(_ALGEBRA, part, s.scale, direct=True)

        return spec_probe(_ALGEBRA, s, x, size, chunk)


def _like(x: Mapping[str, Any]) -> Tensor:
    return x["qkv"] if "qkv" in x else x["q"]


def _step(s: Signature, p: Prepared, S: Tensor) -> tuple[Tensor, Tensor]:
    rows = [None if a is None else a[:, 0].unflatten(1, (s.H, a.shape[2] // s.H)) for a in p[:6]]
    o, state = one_token(xp, ChunkOperands.of(rows, S.unflatten(1, (s.H, -1))), s.scale)
    o = o.flatten(1, 2)
    return o if s.step else o[:, None], state.flatten(1, 2)


class _Plan(NamedTuple):
    """Packed or segmented sequences, longest first; a plain batch has None instead of a plan.

    Attributes:
        begin: the first token of each sequence, with rows laid end to end, on the host.
        length: the number of tokens of each sequence, on the host.
        state: the row of the given states that it reads.
        fresh: whether it starts from zeros instead.
        last: for each row of the final states, the sequence that determines it.
    """

    begin: np.ndarray
    length: np.ndarray
    state: Tensor
    fresh: Tensor
    last: Tensor


def _plan(q: Tensor, cu_seqlens: Any, starts: Tensor | None) -> _Plan | None:
    if cu_seqlens is None and starts is None:
        return None
    bounds, cuts = (None if a is None else on_host(a) for a in (cu_seqlens, starts))
    begin, end, state, fresh, last = place(q.shape[0], q.shape[1], bounds, cuts)
    length = end - begin
    order = np.argsort(-length, kind="stable")
    on_device = lambda a: torch.as_tensor(a, device=q.device)  # noqa: E731
    return _Plan(
        begin[order],
        length[order],
        on_device(state[order]),
        on_device(fresh[order])[:, None, None, None],
        on_device(np.argsort(order)[last]),
    )


def _product(a: Tensor, b: Tensor, name_a: str, name_b: str) -> Tensor:
    return a @ b


_ALGEBRA = Algebra(xp, _product)


def _rule(s: Signature, p: Prepared, S: Tensor, bounds: Any, size: int) -> tuple[Tensor, Tensor]:
    """Compute o [B, T, HV, V] and the final states in the way that fits the caller: eager, compiled or transformed."""
    x = ChunkOperands.of(p[:6], S)
    if p.q.is_meta:  # shapes only; the boundaries of sequences have no values
        return _operation(*x.rows, S, None, None, s.scale, size)
    if torch.compiler.is_compiling():
        return _operation(*x.rows, S, bounds, p.starts, s.scale, size)
    plan = _plan(p.q, bounds, p.starts)
    if torch._C._are_functorch_transforms_active():  # torch.func needs plain operations
        return _forward(x, plan, s.scale, size)[:2]
    return _Rule.apply(*x.rows, S, plan, s.scale, size)


def _rounds(plan: _Plan | None, B: int, T: int, size: int) -> list[tuple[int, int, int]]:
    """Return (rows, first token, tokens) of each round, where tokens is the length of the round's longest chunk."""
    if plan is None:
        return [(B, a, min(size, T - a)) for a in range(0, T, size)]
    longest = int(plan.length[0]) if len(plan.length) else 0
    return [
        (int(np.searchsorted(-plan.length, -a, side="left")), a, min(size, longest - a))
        for a in range(0, longest, size)
    ]


class _Rows:
    """A reader and writer of the tokens of one round, [rows, H, R, C, D], where C is a power of two."""

    def __init__(self, plan: _Plan | None, round_: tuple[int, int, int], like: Tensor) -> None:
        rows, self.first, self.count = round_
        self.size = 1 << (self.count - 1).bit_length()
        self.plan, self.heads = plan, like.shape[2]
        self.index: Tensor | None = None
        self.valid: Any = None
        if plan is not None:
            token = self.first + np.arange(self.count)
            valid = token[None, :] < plan.length[:rows, None]
            index = np.where(valid, plan.begin[:rows, None] + token[None, :], 0)
            self.whole = bool(valid.all())
            self.index = torch.as_tensor(index, device=like.device)
            self.valid = torch.as_tensor(valid, device=like.device)

    def read(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if self.index is None:
            rows = x[:, self.first : self.first + self.count]
        else:
            rows = x.flatten(0, 1)[self.index]
            if not self.whole:
                rows = torch.where(self.valid[..., None, None], rows, torch.zeros((), dtype=x.dtype, device=x.device))
        rows = rows.movedim(1, 2)
        rows = rows.unflatten(1, (self.heads, x.shape[2] // self.heads))
        if self.size != self.count:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, self.size - self.count))
        return rows

    def back(self, rows: Tensor) -> Tensor:
        """Reshape [rows, H, R, C, D] to [rows, tokens, HV, D]."""
        return rows.flatten(1, 2).movedim(1, 2)[:, : self.count]

    def write(self, x: Tensor | None, rows: Tensor | None) -> None:
        if x is None or rows is None:
            return
        rows = self.back(rows)
        if self.index is None:
            x[:, self.first : self.first + self.count] = rows
        else:
            x.view(-1, *x.shape[2:])[self.index[self.valid]] = rows[self.valid]


def _forward(
    x: ChunkOperands, plan: _Plan | None, scale: float, size: int, keep: bool = False
) -> tuple[Tensor, Tensor, list[Any]]:
    """Loop over the operands of all tokens; return o, the final states, and with ``keep`` the backward pass's values.

    Without ``keep`` the loop consists of operations that torch can differentiate by itself.
    """
    q, v, S = x.q, x.v, x.S
    B, T = q.shape[:2]
    if plan is not None:
        S = S[plan.state]
        S = torch.where(plan.fresh, torch.zeros_like(S), S)
    S = S.unflatten(1, (q.shape[2], -1))
    kept: list[Any] = []
    ended: list[Any] = []
    parts, places = [], []
    for round_ in _rounds(plan, B, T, size):
        rows = _Rows(plan, round_, q)
        if round_[0] < S.shape[0]:  # sequences that have ended keep their states
            ended.append(S[round_[0] :])
            S = S[: round_[0]]
        out, after, saved = chunkwise.forward_chunk(_ALGEBRA, ChunkOperands.of(map(rows.read, x.rows), S), scale)
        if keep:
            kept.append((rows, S, saved))
        out = rows.back(out)
        parts.append(out if plan is None else out[rows.valid])
        if plan is not None:
            assert rows.index is not None
            places.append(rows.index[rows.valid])
        S = after
    final = torch.cat([S, *ended[::-1]]).flatten(1, 2)
    if plan is None:
        return torch.cat(parts, 1), final, kept
    o = v.new_zeros((B * T, *v.shape[2:]))
    if parts:
        o = o.index_copy(0, torch.cat(places), torch.cat(parts))
    return o.unflatten(0, (B, T)), final[plan.last], kept


def _backward(
    x: ChunkOperands, plan: _Plan | None, scale: float, kept: list[Any], dO: Tensor, dS: Tensor
) -> list[Tensor | None]:
    """Return the cotangents of the operands that have a row for each token, and of the given states."""
    heads = x.q.shape[2]
    grads = [None if a is None else torch.zeros_like(a, memory_format=torch.contiguous_format) for a in x.rows]
    if plan is not None:
        dS = dS.new_zeros((len(plan.begin), *dS.shape[1:])).index_copy(0, plan.last, dS)
    dS = dS.unflatten(1, (heads, -1)).clone()
    for rows, before, saved in reversed(kept):
        count = before.shape[0]
        part = ChunkOperands.of(map(rows.read, x.rows), before)
        d = chunkwise.backward_chunk(_ALGEBRA, part, scale, saved, rows.read(dO), dS[:count])
        rows.write(grads[0], d.q.sum(2, keepdim=True))
        rows.write(grads[1], d.k.sum(2, keepdim=True))
        for into, new in zip(grads[2:], d[2:6], strict=True):
            rows.write(into, new)
        if count == dS.shape[0]:
            dS = d.S
        else:
            dS[:count] = d.S
    dS = dS.flatten(1, 2)
    if plan is not None:
        given = torch.where(plan.fresh, torch.zeros_like(dS), dS)
        dS = torch.zeros_like(x.S, memory_format=torch.contiguous_format).index_add(0, plan.state, given)
    return [*grads, dS]


class _Rule(torch.autograd.Function):
    """The bare rule with its own gradient, for which it saves the states between chunks and the chunks' solutions."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *x, plan, scale, size = inputs
        keep = any(ctx.needs_input_grad)
        o, final, kept = _forward(ChunkOperands(*x), plan, scale, size, keep)
        if keep:
            ctx.save_for_backward(*x)
            ctx.kept, ctx.rest = kept, (plan, scale, size)
        return o, final

    @staticmethod
    def backward(ctx: Any, dO: Any, dS: Any) -> Any:
        with float32_products(dO.device.type):
            return _Rule._backward(ctx, dO, dS)

    @staticmethod
    def _backward(ctx: Any, dO: Any, dS: Any) -> Any:
        plan, scale, size = ctx.rest
        if not torch.is_grad_enabled():
            x = ChunkOperands(*ctx.saved_tensors)
            return (*_backward(x, plan, scale, ctx.kept, dO, dS), None, None, None)
        # The gradient will be differentiated, so it must consist of operations that torch knows. The inputs are views,
        # since one tensor may be two operands (beta is both gates), and each must get its own part.
        views: list[Any] = [None if a is None else a.view_as(a) for a in ctx.saved_tensors]
        wanted = [i for i in range(len(views)) if ctx.needs_input_grad[i]]
        o, final, _ = _forward(ChunkOperands(*views), plan, scale, size)
        pairs = [(y, d) for y, d in ((o, dO), (final, dS)) if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in pairs], [views[i] for i in wanted], [d for _, d in pairs], create_graph=True
        )
        grads: list[Any] = [None] * 10
        for i, d in zip(wanted, found, strict=True):
            grads[i] = d
        return tuple(grads)


# torch.compile sees the rule as one opaque operation, since tracing would unroll its loop. Such an operation takes
# every tensor as a separate parameter.


@torch.library.custom_op("portable_gdn::rule", mutates_args=())
def _operation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
    scale: float,
    size: int,
) -> tuple[Tensor, Tensor]:
    with float32_products(q.device.type):
        o, final, _ = _forward(ChunkOperands(q, k, v, g, b, w, S), _plan(q, cu_seqlens, starts), scale, size)
    return o.contiguous(), final.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("portable_gdn::rule_backward", mutates_args=())
def _operation_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
    scale: float,
    size: int,
    dO: Tensor,
    dS: Tensor,
) -> list[Tensor]:
    """Compute the gradient, and for it the forward pass again, instead of saving values."""
    x, plan = ChunkOperands(q, k, v, g, b, w, S), _plan(q, cu_seqlens, starts)
    with float32_products(q.device.type):
        kept = _forward(x, plan, scale, size, keep=True)[2]
        return [a.contiguous() for a in _backward(x, plan, scale, kept, dO, dS) if a is not None]


register_gradient(_operation, _operation_backward, constants=2)
