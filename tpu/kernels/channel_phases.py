"""The pipeline's phases for decays by channel: KDA, GDN-2, GLA; heads of 128 channels.

The phases that build the inverse are the pipeline's own. What differs:

- ``scores``: decays do not leave the contraction, so that each of the seven levels of the hierarchy (``decays``) is a
  product of its own; at levels of eight rows and more only the right blocks' rows take part.
- What reads the state (q and e decayed from the chunk's start) and what is written to it (k decayed to the chunk's end)
  is made there too, while the factors are at hand, and kept for ``advance``.
- One beta a head scales columns only, as there; erase gates by channel scale keys before the products, write gates
  values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ..pipeline_plan import Pipeline
from . import inside, phases
from .decays import doubled, joined, split
from .halves import BF16, F32, PIECES, C, Parts, dot, each, exact_pieces, halves, iota, product, spread
from .phases import read, write

__all__ = ["Chunk", "Slot", "slot_shapes"]

Array = Any

_SUBLANES = 8  # rows of a float32 tile
#: Levels behind which a head's scores let the other phases go on.
_PAUSES = (2, 8, 32)


class Slot(NamedTuple):
    """Scratch of one chunk, from ``scores`` to ``advance``; Aqk, and all from packed on, as in ``phases.Slot``."""

    Aqk: Any
    kt: Any  # [heads, n, C, C]: keys decayed to the chunk's end, transposed, and with beta
    reads: Any  # [heads, 2 C, C] bfloat16: q, and below it e, decayed from the chunk's start
    total: Any  # [C, pieces heads] bfloat16: columns of the whole chunk's decay
    v: Any = None  # [heads, C, C] float32: what is written, where it is not v as it lies in HBM
    packed: Any = None
    low16: Any = None
    low32: Any = None
    low64: Any = None
    M: Any = None


def slot_shapes(p: Pipeline) -> list[Any]:
    """A slot's scratch, in order."""
    wide = lambda rows: pltpu.VMEM((p.heads, p.summands, rows, C), BF16)  # noqa: E731
    kept = lambda rows, dtype: pltpu.VMEM((p.heads, rows, C), dtype)  # noqa: E731
    nothing = pltpu.VMEM((8, C), F32)
    erase = p.widths.erase > 0
    return [
        wide(C), wide(C), kept(2 * C if erase else C, BF16), pltpu.VMEM((C, PIECES * p.heads), BF16),
        kept(C, F32) if p.keeps_values else nothing,
        *([kept(16, F32), wide(16), wide(32), wide(64), wide(C)] if erase else []),
    ]  # fmt: skip


def _by_rows(a: Array, b: Array) -> Array:
    """a b^T, both bfloat16."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=F32)


class Chunk(phases.Chunk):
    """The phases of one chunk of a grid step."""

    def _channels(self, name: str, i: int) -> Array:
        """A gate of a value head's channels [C, C] float32, 0 in rows that are not the chunk's."""
        return self._rows(self.scored[self.u], self._loaded(name, i).astype(F32))

    def _log_decay(self, i: int) -> Array:
        g = self._loaded("g", i).astype(F32)
        if self.p.inside.gate:
            rate, bias = (self.x.gate[n : n + 1, i * C : (i + 1) * C] for n in range(2))
            g = inside.channel_decay(self.p.inside, g, rate, bias)
        return self._rows(self.scored[self.u], g)

    def _beta(self) -> Array | None:
        """One a head: [heads, C], tokens in lanes."""
        if self.p.widths.erase != 1:
            return None
        ref, first = self.x.blocks["b"][self.u]
        b = ref[0, 0, :, first : first + C]
        return jnp.where(self._own(self.scored[self.u], iota(b.shape, 1)), b, 0.0) if self.p.masked else b

    def scores(self) -> Iterator[None]:
        p, slot = self.p, self.slots[self.u]
        beta, totals = self._beta(), []
        # ``advance`` reads what the chunk before left of a head until so many rounds have passed.
        later: list[tuple[int, Callable[[], None]]] = []
        rounds, both = 0, None
        for i in range(p.heads):
            if i % p.R == 0:
                both = self._keys(i // p.R)
            for found in self._scores(i, both, None if beta is None else beta[i : i + 1], totals):
                if found is not None:
                    later.append((2 * p.heads + i, partial(self._fill, i, *found)))
                yield
                rounds += 1
                while later and later[0][0] <= rounds:
                    later.pop(0)[1]()
        while later:
            yield
            rounds += 1
            while later and later[0][0] <= rounds:
                later.pop(0)[1]()
        rows = [total[n].astype(F32) for n in range(PIECES) for total in totals]
        slot.total[...] = jnp.concatenate(rows, 0).T.astype(BF16)

    def _scores(self, i: int, both: Array, beta: Array | None, totals: list[Parts]) -> Iterator[Any]:
        """A head's rounds; the last one hands over what ``advance`` will read."""
        p = self.p
        q, k = both[:C], both[C:]
        same, key, g = _by_rows(q, k), k.astype(F32), self._log_decay(i)
        totals.append(exact_pieces(jnp.exp(jnp.sum(g, 0, keepdims=True))))
        P, Q = jnp.exp(g), jnp.ones((C, C), F32)
        rows = [q.astype(F32)]
        if p.widths.erase:
            rows.append(self._channels("b", i) * key if beta is None else key)
        written = None
        if p.keeps_values:
            written = self._operand("v", p.values[i]).astype(F32)
            written = written * self._loaded("w", i).astype(F32) if p.widths.write > 1 else written
        out = [jnp.where(self.row == self.col, same, 0.0), jnp.zeros((C, C), F32)][: len(rows)]
        size, corners = 1, None
        while size < C:
            found = self._level(rows, key, P, Q, size)
            if corners is not None:
                out = [self._beside(a, x, size // 2) for a, x in zip(out, corners, strict=True)]
            corners = found
            P, Q = doubled(P, Q, size)
            if size in _PAUSES:
                yield None
            size *= 2
        out = [self._beside(a, x, size // 2) for a, x in zip(out, corners, strict=True)]
        kept = key * Q
        # Keys are rounded once, before beta, which is as exact as what it scales.
        kt = kept.astype(BF16).T.astype(F32)
        kt = halves(p, kt if beta is None else kt * beta)
        out = out if beta is None else [a * beta for a in out]
        if p.widths.erase:
            self._write_blocks(self.slots[self.u], i, out[1])
        yield halves(p, out[0]), kt, jnp.concatenate([(x * P).astype(BF16) for x in rows], 0), written

    def _fill(self, i: int, Aqk: Parts, kt: Parts, reads: Array, written: Array | None) -> None:
        slot = self.slots[self.u]
        write(slot.Aqk, i, Aqk)
        write(slot.kt, i, kt)
        slot.reads[i] = reads
        if written is not None:
            slot.v[i] = written

    def _level(self, rows: list[Array], k: Array, P: Array, Q: Array, size: int) -> list[Array]:
        """Products of all corners of a level, [C, C] or of the right blocks' rows [C / 2, C]; keys in their lanes."""
        if size < _SUBLANES:
            left = jnp.concatenate([(x * P).astype(BF16) for x in rows], 0)
            keys = (k if size == 1 else k * Q).astype(BF16)
        else:
            right = lambda x: jnp.reshape(split(x, size)[1], (C // 2, C))  # noqa: E731
            left = jnp.concatenate([(right(x) * right(P)).astype(BF16) for x in rows], 0)
            kept = split(k, size)[0] * split(Q, size)[0]
            keys = joined(kept, jnp.zeros_like(kept)).astype(BF16)
        found = _by_rows(left, keys)
        height = found.shape[0] // len(rows)
        return [found[n * height : (n + 1) * height] for n in range(len(rows))]

    def _beside(self, finer: Array, corners: Array, size: int) -> Array:
        """A level's corners beside the finer levels, which are the lanes of a row's own block of ``size`` rows."""
        keep = self.col >= (self.row & -size)
        if size < _SUBLANES:
            return jnp.where(keep, finer, corners)
        left, right = split(finer, size)
        return joined(left, jnp.where(split(keep, size)[1], right, jnp.reshape(corners, right.shape)))

    def advance(self) -> Iterator[None]:
        p, x, slot = self.p, self.x, self.slots[self.u]
        heads, S, from_state, total, u = range(p.heads), [], [], [], []
        for i in heads:
            S.append(self._state(i))
            if "S" in p.keeps:
                x.S_kept[0, self.u, i] = S[i]
            from_state.append(dot(slot.reads[i], S[i].astype(BF16)))
            total.append(spread(slot.total[...], p.heads, i))
            yield
        for i in heads:
            rest = slot.v[i] if p.keeps_values else self._head("v_late", p.values[i]).astype(F32)
            if p.widths.erase:
                rest = rest - from_state[i][C:]
            rest = self._rows(self.advanced, rest)
            u.append(product(p, read(slot.M, i), halves(p, rest)) if p.widths.erase else rest)
            if p.widths.erase:
                self._keep("M", i, read(slot.M, i))
                self._keep("u", i, u[i])
            self._keep("Aqk", i, read(slot.Aqk, i))
            yield
        for i in heads:
            both = each(lambda a, b: jnp.concatenate([a, b], 0), read(slot.Aqk, i), read(slot.kt, i))
            u[i] = product(p, both, halves(p, u[i]))
            yield
        for i in heads:
            self._give(i, (from_state[i][:C] + u[i][:C]) * p.scale)
            x.states[self.u + 1][i] = S[i] * total[i] + u[i][C:]
            yield
