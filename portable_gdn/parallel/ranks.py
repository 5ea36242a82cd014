"""Context parallelism for torch tensors: each process of a group has a piece of the tokens of one packed row.

The algorithm is that for JAX arrays (``tokens.py``): one call computes the map of the sequence that leaves each piece,
all processes receive all maps, and each then computes its own tokens from the state that enters them.
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
    """Return the outputs of this process's tokens, [1, T, HV, V].

    Args:
        call: The rule, which must be differentiable.
        x: The operands of one row that have tokens.
        bounds: The boundaries of the sequences in this piece [n + 1].
        places: The same boundaries as Python integers.
        enters: Whether the first sequence began in an earlier process.
        leaves: Whether the last sequence continues in the next process.
        group: The processes in the order of their pieces. All of them must call this, and run its backward pass.
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
    """Return the all-gather as a ``torch.autograd.Function``; torch is imported on the first call."""
    import torch
    import torch.distributed as dist

    class Gathered(torch.autograd.Function):
        """Gather a tensor from every process; the other arguments make autograd run if any of them needs a gradient."""

        @staticmethod
        def forward(ctx: Any, group: Any, mine: Tensor, *others: Tensor) -> Tensor:
            """Stack the tensors ``mine`` [...] of all D processes to [D, ...]."""
            ctx.group, ctx.others = group, len(others)
            found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, mine.contiguous(), group=group)
            return torch.stack(found)

        @staticmethod
        def backward(ctx: Any, *d: Tensor) -> tuple[Any, ...]:
            """Sum the gradients that all processes have for this process's tensor."""
            total = d[0].contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
            return None, total[dist.get_rank(ctx.group)], *[None] * ctx.others

    return Gathered
