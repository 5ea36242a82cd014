"""The bare rule on FLA's kernels, and the cases that they do not handle: resets, empty sequences, too many blocks.

The chunk forms sum gates, so resets need care. If products round to 16 bits, a gate that is a reset becomes ``FLOOR``,
whose exp is also 0; sums then keep more digits than products, and the call need not wait for the device to inspect g.
In float32 a sequence is cut where a gate is a reset (``pieces.py``). With one gate per head, heads are laid end to end
and all pieces run at once. With one gate per channel, the piece after a reset needs the state that the piece before it
left in the other channels, so the pieces of a sequence run one after another. That is exact, but takes a launch per
piece, so only a few pieces are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.errors import GdnError
from ..spec.sequences import Placed, place
from ..spec.stages import RESET
from ..spec.torch_tensors import on_host
from . import interpreter
from .families import CHUNK, Rule
from .launching import Settings, launching
from .operations import Operands, chunked, normalised, recurrent
from .pieces import Pieces, cut_heads_apart, cut_in_turn, whole

__all__ = ["apply", "products"]

# The lowest sum of gates in a chunk: about 2^11 in base 2, in which FLA sums, where float32 numbers are 2^-12 apart.
LONGEST_FALL = -1419.0
FLOOR = -110.0  # the value for a reset: its exp is 0 in float32, even after the rounding of sums that contain it

MOST_TURNS = 16  # the most pieces of one sequence; more would come close to one kernel launch per token
MOST_BLOCKS = 65535  # the most blocks of a launch along the axis that FLA uses for sequences times heads


def products(ieee: bool) -> str:
    """Return the precision of float32 products on this machine in kernels that do not specify one."""
    if interpreter.chosen() or ieee:
        return "float32"
    if not torch.cuda.is_available():
        return "tf32"  # XPU
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
        return "tf32" if arch.startswith("gfx942") else "float32"
    return "tf32" if torch.cuda.get_device_capability() >= (8, 0) else "float32"


def apply(
    rule: Rule, x: Operands, S: Tensor, bounds: Any, starts: Tensor | None, recurs: bool
) -> tuple[Tensor, Tensor]:
    """Compute o [B, T, HV, V] and the final states [N, HV, K, V].

    Args:
        rule: the properties of the call.
        x: operands that ``operations.fitted`` returned.
        S: the initial states.
        bounds: cu_seqlens on the host or a device, or None.
        starts: true where segments begin, or None.
        recurs: whether to use the recurrent kernels, which have no gradient.
    """
    settings = Settings(rule.pinned, rule.ieee)
    if recurs:
        with launching(settings):
            return recurrent(rule, x, S)
    plain = bounds is None and starts is None

    def placed() -> Placed:
        return place(*x.q.shape[:2], *(None if a is None else on_host(a) for a in (bounds, starts)))

    def compute(S: Tensor, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        operands = Operands._make(given)
        return _rule(rule, normalised(operands) if rule.raw else operands, S, placed, plain)

    o, state = compute(S, *x) if settings == Settings() else _Launched.apply(settings, compute, S, *x)
    return _Once.apply(o, state) if o.requires_grad else (o, state)


class _Launched(torch.autograd.Function):
    """A function whose kernels are launched with given settings, in its backward pass, too."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, function: Any, *given: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        ctx.given = [None if a is None else a.detach().requires_grad_(w) for a, w in zip(given, wanted, strict=True)]
        ctx.settings = settings
        with torch.set_grad_enabled(any(wanted)), launching(settings):
            ctx.found = function(*ctx.given)
        return tuple(a.detach() for a in ctx.found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise _once()
        leaves = [a for a in ctx.given if a is not None and a.requires_grad]
        with launching(ctx.settings):
            grads = iter(torch.autograd.grad(ctx.found, leaves, cotangents, retain_graph=True, allow_unused=True))
        return None, None, *(next(grads) if a is not None and a.requires_grad else None for a in ctx.given)


def _once() -> GdnError:
    return GdnError("create_graph is True; FLA's kernels have no second derivative, and backend 'torch' has.")


class _Once(torch.autograd.Function):
    """The identity, which makes a second derivative an error: torch cannot differentiate FLA's gradient."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return o.view_as(o), state.view_as(state)

    @staticmethod
    def backward(ctx: Any, dO: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            raise _once()
        return dO, dS


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


def _rule(rule: Rule, x: Operands, S: Tensor, placed: Callable[[], Placed], plain: bool) -> tuple[Tensor, Tensor]:
    """Compute o [B, T, HV, V] and the final states [N, HV, K, V]; with ``plain``, sequences are whole rows."""
    reset = x.g < RESET if rule.resets else None
    if reset is not None and x.q.dtype != torch.float32:
        x, reset = x._replace(g=torch.where(reset, FLOOR, x.g)), None
    if reset is None or not bool(reset.any()):
        if plain:
            return _kernel(rule, x, S, None)
        sequences = placed()
        o, after = _launch(rule, x.map(_rows), _states(S, sequences), whole(sequences))
        return o.unflatten(0, x.q.shape[:2]), after[_index(sequences.last, S)]
    flat = x._replace(g=torch.where(reset, 0.0, x.g)).map(_rows)
    compute = _heads_apart if rule.by_head else _in_turn
    o, state = compute(rule, flat, S, placed(), _rows(reset))
    return o.unflatten(0, x.q.shape[:2]), state


def _rows(a: Tensor) -> Tensor:
    """Lay rows end to end."""
    return a.flatten(0, 1)


def _heads_apart(rule: Rule, flat: Operands, S: Tensor, sequences: Placed, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Compute every head as a sequence of its own, cut at its own resets."""
    heads = flat.v.shape[1]
    cut, last = cut_heads_apart(sequences, on_host(reset[..., 0]))
    line = flat.map(lambda a: a.repeat_interleave(heads // a.shape[1], 1).movedim(1, 0).flatten(0, 1)[:, None])
    states = S[_index(sequences.state, S)].flatten(0, 1)[:, None]
    o, after = _launch(rule, line, _states(states, cut), cut)
    final = after[_index(last, S)].unflatten(0, (-1, heads))[:, :, 0]
    return o[:, 0].unflatten(0, (heads, -1)).movedim(0, 1).contiguous(), final[_index(sequences.last, S)]


def _in_turn(rule: Rule, flat: Operands, S: Tensor, sequences: Placed, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the pieces of each sequence one after another, and those of different sequences together."""
    turns = cut_in_turn(sequences, on_host(reset.flatten(1).any(-1)))
    if len(turns) > MOST_TURNS:
        raise GdnError(
            f"g holds resets (below {RESET:g}) of single channels at {len(turns) - 1} tokens of a sequence; FLA's "
            f"kernels know none, and are run piece by piece for at most {MOST_TURNS - 1}; backend 'torch' takes any."
        )
    states, o = _states(S, sequences), flat.v.new_zeros(flat.v.shape)
    for turn in turns:
        which, lost = _index(turn.state, S), reset[_index(turn.begin, S)][..., None]
        before = torch.where(lost, 0.0, states[which])
        new, after = _launch(rule, flat, before, turn)
        o, states = o + new, states.index_copy(0, which, after)
    return o, states[_index(sequences.last, S)]


def _index(a: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(a, device=like.device)


def _states(S: Tensor, pieces: Placed | Pieces) -> Tensor:
    """Return the state from which each piece starts."""
    states = S[_index(pieces.state, S)]
    return torch.where(_index(pieces.fresh, S)[:, None, None, None], 0.0, states) if pieces.fresh.any() else states


def _launch(rule: Rule, flat: Operands, states: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Compute pieces of rows laid end to end: o like v, 0 at tokens outside all pieces, and the state after each piece.

    FLA gets neither empty pieces, whose states do not change, nor tokens outside all pieces.
    """
    live = np.flatnonzero(pieces.end > pieces.begin)
    v = flat.v
    o, after = v.new_zeros(v.shape), states
    most = max(1, MOST_BLOCKS // v.shape[1])
    for some in (live[i : i + most] for i in range(0, len(live), most)):
        begin, end = pieces.begin[some], pieces.end[some]
        bounds = np.concatenate([[0], np.cumsum(end - begin)])
        if bounds[-1] == len(v) and np.array_equal(begin, bounds[:-1]):  # they cover the rows in order
            out, new = _kernel(rule, flat.map(lambda a: a[None]), states[_index(some, v)], bounds)
            o = out[0]
        else:
            tokens = _index(np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)]), v)
            picked = Operands._make(None if a is None else a[tokens][None] for a in flat)
            out, new = _kernel(rule, picked, states[_index(some, v)], bounds)
            o = o.index_copy(0, tokens, out[0])
        after = new if len(some) == len(states) else after.index_copy(0, _index(some, v), new)
    return o, after


def _kernel(rule: Rule, x: Operands, S: Tensor, bounds: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """Call FLA's chunk form once; packed sequences have their boundaries on the host, too."""
    if rule.decays and x.q.dtype == torch.float32 and products(rule.ieee) == "float32":  # otherwise products round more
        _check_falls(x.g, rule.chunk or CHUNK, bounds)
    host = None if bounds is None else torch.as_tensor(bounds, dtype=torch.int64)
    return chunked(rule, x, S, None if host is None else host.to(S.device), host)
