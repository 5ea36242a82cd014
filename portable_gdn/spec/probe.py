"""The seven stages of a whole call, kept by chunk: for whoever asks where two computations part.

The form in which every backend's ``probe`` returns them: by name the parts of each stage (``chunkwise.stage_chunk``),
with [B, chunks a row, HV] before the stage's own dimensions. A row's last chunk is filled up with zeros. A part that
the variant does not have (scores of keys without an erase gate) is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .chunkwise import ChunkOperands, stage_chunk
from .problem import Signature
from .prologue import Prepared, prepare
from .stages import STAGES, Algebra, Array

__all__ = ["probe", "probe_prepared"]

Probed = dict[str, tuple[Any, ...]]
#: Computes one chunk's stages, as ``stage_chunk`` does.
Chunk = Callable[[ChunkOperands], Probed]


def probe(
    algebra: Algebra, s: Signature, operands: Mapping[str, Array], size: int, chunk: Chunk | None = None
) -> Probed:
    """The stages of a call without packed sequences, in chunks of ``size`` tokens (a power of two)."""
    return probe_prepared(algebra, s, prepare(algebra.xp, s, operands), size, chunk)


def probe_prepared(algebra: Algebra, s: Signature, p: Prepared, size: int, chunk: Chunk | None = None) -> Probed:
    """The stages from operands of the bare rule, in chunks of ``size`` tokens (a power of two).

    Args:
        chunk: computes one chunk; ``stage_chunk`` by default.
    """
    xp = algebra.xp
    if chunk is None:

        def chunk(x: ChunkOperands) -> Probed:
            return stage_chunk(algebra, x, s.scale)

    B, T, H, R = s.B, s.T, s.H, s.HV // s.H

    def rows(a: Array | None, first: int) -> Array | None:
        """[B, T, heads, D] as [B, H, R or 1, size, D], tokens from ``first`` on, filled up with zeros."""
        if a is None:
            return None
        part = a[:, first : first + size]
        if part.shape[1] < size:
            filling = xp.zeros_like(xp.broadcast_to(a[:, :1], (B, size - part.shape[1], *a.shape[2:])))
            part = xp.concat([part, filling], axis=1)
        part = xp.moveaxis(part, 1, 2)
        return xp.reshape(part, (B, H, a.shape[2] // H, size, a.shape[3]))

    def whole(a: Array | None) -> Array | None:
        """[B, H, R or 1, ...] as [B, 1, HV, ...]."""
        if a is None:
            return None
        a = xp.broadcast_to(a, (B, H, R, *a.shape[3:]))
        return xp.reshape(a, (B, 1, H * R, *a.shape[3:]))

    S = xp.zeros_like(xp.broadcast_to(p.v[:, :1, :, None, :], (B, 1, s.HV, s.K, s.V)))[:, 0] if p.S is None else p.S
    S = xp.reshape(S, (B, H, R, s.K, s.V))
    starts = None if p.starts is None else p.starts[:, :, None, None]
    found: list[dict[str, tuple[Any, ...]]] = []
    for first in range(0, T, size):
        part = [rows(a, first) for a in (p.q, p.k, p.v, p.g, p.b, p.w)]
        begin = None
        if starts is not None:
            cut = starts[:, first : first + size]
            if cut.shape[1] < size:
                filling = xp.zeros_like(xp.broadcast_to(cut[:, :1], (B, size - cut.shape[1], 1, 1)))
                cut = xp.concat([cut, filling], axis=1)
            begin = xp.reshape(cut, (B, 1, 1, size, 1))
        stages = chunk(ChunkOperands.of(part, S, begin))
        S = stages["state"][1]
        found.append({name: tuple(whole(a) for a in parts) for name, parts in stages.items()})
    return {
        name: tuple(
            None if part is None else xp.concat([stages[name][i] for stages in found], axis=1)
            for i, part in enumerate(found[0][name])
        )
        for name in STAGES
    }
