"""How the window kernel cuts an update: which heads share a grid step, and what that needs. It does not import jax.

A grid step is one row of the batch and one block of heads. All heads of a row in one step is best: a state of 128 x 128
is read and written in 140 cycles a head on a v6e, and its arithmetic takes 56, so that a step's own cost, some hundred
cycles, is hidden as long as a step has several heads. Value heads of one key head are together, since they share its
columns of k and q.
"""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import Signature
from ....spec.variants import Granularity
from ...chips import Chip
from ..common.tiles import LANES, SUBLANES, whole_lanes

__all__ = ["LONGEST", "TAPS", "Before", "Window", "window_plan"]

_STATE_BYTES = {"float32": 4, "bfloat16": 2}
#: Tokens of a row, at most, that are computed as one chunk: the work between them grows with their square.
LONGEST = 32
#: Rows of a head's taps: at most seven, and the bias.
TAPS = SUBLANES


class Before(NamedTuple):
    """What of a mixer lies inside a chunk, before the rule: the convolution, the norm of q and k, and q's scale."""

    width: int
    silu: bool
    l2norm: bool
    scale: float


class Window(NamedTuple):
    """The plan.

    Attributes:
        rows: N. blocks: of heads; key_heads and value_heads: in each. key_dim, value_dim: K and V.
        places: P, tokens of a row at most: those that waited, then its own. kept: whether own tokens may wait.
        erases: whether there is an erase gate. by_channel: whether decay or erase has a value a channel;
        erases_channels: whether erase has.
        chunked: whether a row's tokens are one chunk, P a multiple of 8, or go one by one.
        before: the convolution and what follows it, where the kernel does them; else None.
        checkpoints: how many multiples of the length between checkpoints a row can reach.
        state_dtype: of the pool. vmem: bytes of VMEM. parallel: whether blocks are shared among cores.
    """

    rows: int
    blocks: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    places: int
    kept: bool
    erases: bool
    by_channel: bool
    erases_channels: bool
    chunked: bool
    before: Before | None
    checkpoints: int
    state_dtype: str
    vmem: int

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


def window_plan(s: Signature, chip: Chip) -> Window | None:
    """The plan of an update, or None where even one key head's states do not fit into VMEM."""
    assert s.update is not None
    kind = s.update
    places = kind.room + min(max(kind.window, 1), s.T)
    fine = (Granularity.GROUP, Granularity.CHANNEL)
    by_channel = s.variant.decay in fine or s.variant.erase in fine
    most = min(kind.columns, -(-places // kind.checkpoint_every)) if kind.columns else 0
    erases_channels = s.variant.erase in fine
    # Two tokens one by one take no longer than their states' traffic, to which a chunk of eight places adds.
    chunked = s.precision != "highest" and 2 < places <= LONGEST
    if chunked:
        places = -(-places // SUBLANES) * SUBLANES
    before = _before(s) if chunked and not by_channel else None
    for blocks in (n for n in range(1, s.H + 1) if s.H % n == 0):
        keys, heads = s.H // blocks, s.HV // blocks
        state = heads * -(-s.K // SUBLANES) * SUBLANES * whole_lanes(s.V)
        stored = (2 + most) * 2 * _STATE_BYTES[kind.state_dtype] * state
        if chunked:
            rows = 2 * keys + (heads * (1 + erases_channels) if by_channel else 0)
            tokens = places * (rows * whole_lanes(s.K) + 2 * heads * whole_lanes(s.V) + whole_lanes(2 * heads))
            rest = 4 * places * heads * whole_lanes(s.V) if most else 0
            if before is not None:  # twice the rows, taps, and what is made of them
                own = 2 * keys * whole_lanes(s.K) + heads * whole_lanes(s.V)
                tokens, rest = tokens + (SUBLANES + TAPS) * own, rest + 4 * places * own
        else:
            rows = 2 * keys + (3 * heads if by_channel else 0)
            tokens = places * (whole_lanes(s.K) * (rows + SUBLANES) + 2 * whole_lanes(s.V) * (heads + SUBLANES))
            rest = (4 * state if places > 1 else 0) + 4 * whole_lanes(s.K) * (whole_lanes(rows) + LANES)
        spare = 8 << 20 if chunked else 4 << 20  # pieces of states, and what else does not stay in registers
        vmem = stored + rest + 2 * 4 * tokens + spare
        if vmem <= chip.vmem_limit and blocks >= min(chip.cores, s.H):
            sizes = (s.N, blocks, keys, heads, s.K, s.V, places)
            gates = (s.variant.erase is not Granularity.NONE, by_channel, erases_channels)
            return Window(*sizes, kind.window > 0, *gates, chunked, before, most, kind.state_dtype, vmem)
    return None


def _before(s: Signature) -> Before | None:
    """What of a mixer a chunk does itself, if its decays are one per head and one gate erases and writes, or none.

    With decays by channel the vector unit is busy already: the convolution would add 70 cycles a head on a v6e.
    """
    if s.conv is None or s.conv.width >= TAPS or not (s.has("beta") or not (s.has("erase") or s.has("write"))):
        return None
    return Before(s.conv.width, s.conv.activation == "silu", s.qk_l2norm, s.scale)
