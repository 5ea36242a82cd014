"""Context parallelism of torch tensors: each process of a group has a piece of the tokens of one packed row.

The same algorithm as for JAX arrays (``tokens.py``): the map of the sequence that leaves each piece is found by one
call, all processes get all maps, and each makes the call of its own tokens with the state that enters them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ..spec.torch_tensors import float32_products
from ..spec.transition import Transition, apart, entering, widened, widened_state

__all__ = ["run_ranks"]

Tensor = Any
#: A call of the rule by its operands with tokens, its states or None, and boundaries: o, and the final states.
Call = Callable[[Mapping[str, Tensor], Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


def run_ranks(
    call: Call, x: Mapping[str, Tensor], bounds: Tensor, places: Sequence[int], enters: bool, leaves: bool, group: Any
) -> Tensor:
    """The outputs of this process's tokens, [1, T, HV, V].

    Args:
        call: the rule, differentiable.
        x: operands with tokens, of one row.
        bounds: of the sequences in this piece [n + 1], and places: the same as numbers.
        enters: whether the first of them began in another process.
        leaves: whether the last of them goes on in the next one.
        group: the processes, in the order of their pieces; all of them call this, and go back through it.
    """
    import array_api_compat.torch as xp
    import torch
    import torch.distributed as dist

    v = x["v"]
    HV, K, V = v.shape[2], x["k"].shape[-1], v.shape[3]
    zeros = torch.zeros((1, HV, K, V), dtype=torch.float32, device=v.device)
    A = torch.zeros((1, HV, K, K), dtype=torch.float32, device=v.device)
    B = zeros
    if leaves:
        last = {name: a[:, places[-2] :] for name, a in x.items()}
        if enters and len(places) == 2:  # one sequence, through the whole piece
            state = call(widened(xp, last, K), widened_state(xp, zeros), None)[1]
            A, B = apart(state, V)
        else:
            B = call(last, zeros, None)[1]
    mine = torch.cat([A, B], dim=-1)
    pieces = _gathered().apply(group, mine, *x.values())
    rank = dist.get_rank(group)
    with float32_products(v.device.type):
        maps = [Transition(piece[..., :K], piece[..., K:]) for piece in pieces[:rank]]
        _, state = entering(torch.matmul, maps, zeros)
    # Every process goes back through the exchange, also one that nothing enters.
    state = torch.where(torch.tensor(enters, device=v.device), state, pieces[0, ..., K:] * 0)
    first = torch.cat([state, zeros.expand(len(places) - 2, HV, K, V)])
    return call(x, first, bounds)[0]


@cache
def _gathered() -> Any:
    """The exchange as a ``torch.autograd.Function``; torch is imported when it is asked for."""
    import torch
    import torch.distributed as dist

    class Gathered(torch.autograd.Function):
        """A tensor of every process, stacked; others are given so that a gradient is asked for if any has one."""

        @staticmethod
        def forward(ctx: Any, group: Any, mine: Tensor, *others: Tensor) -> Tensor:
            """Stack what all processes have, ``mine`` [..] each, to [D, ..]."""
            ctx.group, ctx.others = group, len(others)
            found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, mine.contiguous(), group=group)
            return torch.stack(found)

        @staticmethod
        def backward(ctx: Any, *d: Tensor) -> tuple[Any, ...]:
            """The sum over the processes of what each has for this one's."""
            total = d[0].contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
            return None, total[dist.get_rank(ctx.group)], *[None] * ctx.others

    return Gathered
