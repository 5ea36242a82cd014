"""The seven stages of a whole call, kept for every chunk, to find where two computations begin to differ.

Every backend's ``probe`` returns stages in this form: a dictionary from the name of a stage to its parts (see
``chunkwise.stage_chunk``), whose leading dimensions are [B, chunks per row, HV]. The last chunk of a row is padded with
zeros. A part that the variant does not have (the scores of keys, if there is no erase gate) is None.
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
#: A function that computes the stages of one chunk, as ``stage_chunk`` does.
Chunk = Callable[[ChunkOperands], Probed]


def probe(
    algebra: Algebra, s: Signature, operands: Mapping[str, Array], size: int, chunk: Chunk | None = None
) -> Probed:
    """Compute the stages of a call that has no packed sequences.

    Args:
        algebra: the array namespace and the matrix product to use.
        s: the call.
        operands: the call's operands by name.
        size: the number of tokens per chunk, a power of two.
        chunk: computes the stages of one chunk; ``stage_chunk`` by default.

    Returns:
        The parts of each stage, by the stage's name.
    """
    return probe_prepared(algebra, s, prepare(algebra.xp, s, operands), size, chunk)


def probe_prepared(algebra: Algebra, s: Signature, p: Prepared, size: int, chunk: Chunk | None = None) -> Probed:
    """Compute the stages from operands of the bare rule, in chunks of ``size`` tokens (a power of two).

    Args:
        algebra: the array namespace and the matrix product to use.
        s: the call.
        p: the operands of the bare rule.
        size: the number of tokens per chunk, a power of two.
        chunk: computes the stages of one chunk; ``stage_chunk`` by default.

    Returns:
        The parts of each stage, by the stage's name.
    """
    xp = algebra.xp
    if chunk is None:

        def chunk(x: ChunkOperands) -> Probed:
            return stage_chunk(algebra, x, s.scale)

    B, T, H, R = s.B, s.T, s.H, s.HV // s.H

    def rows(a: Array | None, first: int) -> Array | None:
        """Return ``size`` tokens of [B, T, heads, D] from ``first`` on, padded with zeros: [B, H, R or 1, size, D]."""
        if a is None:
            return None
        part = a[:, first : first + size]
        if part.shape[1] < size:
            filling = xp.zeros_like(xp.broadcast_to(a[:, :1], (B, size - part.shape[1], *a.shape[2:])))
            part = xp.concat([part, filling], axis=1)
        part = xp.moveaxis(part, 1, 2)
        return xp.reshape(part, (B, H, a.shape[2] // H, size, a.shape[3]))

    def whole(a: Array | None) -> Array | None:
        """Reshape [B, H, R or 1, ...] to [B, 1, HV, ...]."""
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
