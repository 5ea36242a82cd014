"""The phase ``advance`` with decays by channel: KDA, GDN-2, GLA; heads of 128 channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ..common.products import dot
from ..common.registers import BF16, F32
from ..common.summands import each
from ..common.tiles import CHUNK
from .geometry import Pipeline
from .memory import ChunkMemory
from .products import halves, product, spread
from .slots import ChannelSlot, read

__all__ = ["advance"]

Array = Any
C = CHUNK


def advance(p: Pipeline, chunk: ChunkMemory, slot: ChannelSlot) -> Iterator[None]:
    """What the state and the chunk's own tokens give, the output, and the next state. Stops after each value head."""
    heads, S, from_state, total, u = range(p.heads), [], [], [], []
    kept = chunk.outputs.kept
    for i in heads:
        S.append(chunk.state(i))
        chunk.keep_state(i, S[i])
        from_state.append(dot(slot.reads[i], S[i].astype(BF16)))
        total.append(spread(slot.total[...], p.heads, i))
        yield
    for i in heads:
        rest = slot.v[i] if p.keeps_values else chunk.v.late(p.values[i]).astype(F32)
        if slot.blocks is not None:
            rest = rest - from_state[i][C:]
        rest = chunk.advanced_rows(rest)
        if slot.blocks is None:
            u.append(rest)
        else:
            u.append(product(p, read(slot.blocks.M, i), halves(p, rest)))
            chunk.keep(kept.M, i, read(slot.blocks.M, i))
            chunk.keep(kept.u, i, u[i])
        chunk.keep(kept.Aqk, i, read(slot.Aqk, i))
        yield
    for i in heads:
        both = each(lambda a, b: jnp.concatenate([a, b], 0), read(slot.Aqk, i), read(slot.kt, i))
        u[i] = product(p, both, halves(p, u[i]))
        yield
    for i in heads:
        chunk.put_head(i, (from_state[i][:C] + u[i][:C]) * p.scale)
        chunk.put_state(i, S[i] * total[i] + u[i][C:])
        yield
