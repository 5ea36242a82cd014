"""The forward kernel for long sequences: chunks in a software pipeline.

A chunk's work is one long chain of dependent products, and the matrix unit takes products in program order: a head by
itself leaves it idle most of the time. So a grid step works on several heads, and of each on several chunks that are at
different stages; what the file has side by side is independent, and heads and phases alternate in program order.

| phase | chunk | what | unit |
|---|---|---|---|
| ``scores`` | c | decays, Akk, Aqk, k^T scaled for the state; diagonal blocks of 16, side by side | MXU, vector |
| ``solve_16`` | c - 1 | those blocks' inverses, by substitution, in float32 | XLU, vector |
| ``solve_64`` | c - 2 | joins blocks to 32, and begins to join them to 64 | MXU |
| ``solve_128`` | c - 3 | joins blocks to 64 and to 128: the whole inverse | MXU |
| ``advance`` | c - U | what the state and the chunk's own tokens give, the output, the next state | MXU, vector |

U chunks share a grid step, each with scratch of its own, so that the compiler sees which loads and stores concern each
other; chunk c's scratch is read by ``advance`` before ``scores`` fills it again.

The algebra differs from the specification's in one place: writing M = (I + L diag(b))^-1, where Akk = diag(b) L, the
inverse of the specification is T = diag(b) M diag(b)^-1, and Vn = diag(b) u with u = M (v - (k exp G) S). So gates only
ever scale columns of matrices, which a row of lanes does for nothing, and u takes Vn's place (b enters Aqk and k^T).
What must scale rows (exp G, and G itself in differences) is spread across the lanes by the matrix unit, from three
bfloat16 pieces that add up to the float32 value, bit for bit: the lane broadcast of the XLU takes four times as long.

With decays by channel ``scores`` and ``advance`` are those of ``channel_phases``, and without an erase gate there is
nothing to solve.

A reset inside a chunk: row i sees columns j with i - j <= run_i, the number of tokens since the last reset, and 2^G
is 0 behind a reset for whatever comes from before the chunk.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import table as tb
from ..pipeline_plan import Pipeline
from . import channel_phases, inside
from .halves import BF16, F32, C
from .phases import Chunk, Gates, Part, Slot, placed, slot_shapes
from .results import result_shapes
from .settings import pallas_call

__all__ = ["Channels", "GateOperands", "forward"]

Array = Any


class _Entry(NamedTuple):
    """Of packed sequences: the table's words of the chunks of a grid step, and the step's group of heads."""

    words: list[dict[str, Array]]
    group: Array


def _read_table(p: Pipeline, table: Any, part: Array, at: Array) -> _Entry:
    group = part * (p.groups // p.parts) + lax.div(at, jnp.int32(p.steps))
    first = lax.rem(at, jnp.int32(p.steps)) * p.U
    names = {"block": tb.BLOCK, "begin": tb.BEGIN, "end": tb.END, "slot": tb.SLOT, "flags": tb.FLAGS}
    words = [{name: table[(first + u) * tb.WORDS + n] for name, n in names.items()} for u in range(p.U)]
    return _Entry(words, group)


def _parts(p: Pipeline, entry: _Entry) -> list[Part]:
    return [Part(w["begin"], w["end"], w["flags"] & tb.FIRST != 0, w["flags"] & tb.FRESH != 0) for w in entry.words]


def _kernel(p: Pipeline, names: tuple[str, ...], *refs: Any) -> None:
    """``names``: of what ``refs`` are, in order; the slots follow."""
    x, scratch = SimpleNamespace(**dict(zip(names, refs, strict=False))), refs[len(names) :]
    size = len(scratch) // p.U
    of = channel_phases.Slot if p.by_channel else Slot
    slots: list[Any] = [of(*scratch[n * size : (n + 1) * size]) for n in range(p.U)]
    part, entry = pl.program_id(0), pl.program_id(1)
    units = range(p.U)
    several = lambda name: [getattr(x, f"{name}{u}") for u in units]  # noqa: E731
    held = [name for name in ("q", "k", "v", "g", "b", "w", "q_late", "k_late", "v_late") if _has(p, name)]
    if p.packed:
        now, late = (_read_table(p, x.table, part, at) for at in (_now(p, entry), _late(entry)))
        scored, advanced = _parts(p, now), _parts(p, late)
        x.blocks = {name: [(ref, 0) for ref in several(name)] for name in held}
        x.states, x.stages, x.S_first = [*several("S"), x.S0], several("stage"), several("S_first") if p.starts else []

        @pl.when(entry > 1)
        def _() -> None:
            _leave(p, x, _read_table(p, x.table, part, entry - 2), wait=True)

    else:
        step, step_late = (lax.rem(at, jnp.int32(p.steps)) for at in (_now(p, entry), _late(entry)))
        scored, advanced = ([Part(0, p.T - (at * p.U + u) * C) for u in units] for at in (step, step_late))
        x.blocks = {name: [(getattr(x, name), u * C) for u in units] for name in held}
        x.states = [x.S] * (p.U + 1)

        @pl.when(step_late == 0)
        def _() -> None:
            for i, value in enumerate(p.values):
                key = p.keys[i // p.R]
                x.S[i, : key.lanes, : value.lanes] = placed(x.S_first[0, i], key, value)

    if p.inside.width:
        if p.packed:
            x.windows = {name: [(ref, 0) for ref in several(f"{name}_window")] for name in "qkv"}
            for u in units:
                _fill_window_of_chunk(p, x, u, scored[u])
        else:
            x.windows = {name: [(getattr(x, f"{name}_window"), u * C) for u in units] for name in "qkv"}
            _fill_windows(p, x, step == 0)
    gates: list[Gates] = []
    for u in units:
        chunk = (channel_phases.Chunk if p.by_channel else Chunk)(p, x, slots, gates, u, scored, advanced)
        # The order decides what the units get first; of those that were compiled, this one costs least.
        phases = [chunk.advance(), chunk.solve_128(), chunk.scores(), chunk.solve_64(), chunk.solve_16()]
        if not p.widths.erase:
            phases = [chunk.advance(), chunk.scores()]
        while phases:
            phases = [phase for phase in phases if next(phase, phase) is not phase]

    if p.packed:

        @pl.when(entry > 0)
        def _() -> None:
            _leave(p, x, late, wait=False)

        @pl.when(entry == p.entries)
        def _() -> None:
            _leave(p, x, late, wait=True)

    else:

        @pl.when(step_late == p.steps - 1)
        def _() -> None:
            for i, value in enumerate(p.values):
                key = p.keys[i // p.R]
                x.S_last[0, i] = x.S[i, key.low : key.high, value.low : value.high]


def _leave(p: Pipeline, x: SimpleNamespace, entry: _Entry, wait: bool) -> None:
    """Send what a grid step computed of packed sequences to HBM, or wait until it is there.

    A block whose next chunk belongs to the same step is sent with that one; a state, with its sequence's last chunk.
    That of an empty sequence is what was given, to the bit.
    """
    width, whole = p.heads * p.V, all(span.whole for span in (*p.keys, *p.values))
    for u, words in enumerate(entry.words):

        def o(u: int = u, words: dict[str, Array] = words) -> None:
            place = pl.ds(words["block"] * C, C), pl.ds(entry.group * width, width)
            copy = pltpu.make_async_copy(x.stages[u], x.o.at[place], x.o_sent.at[u])
            copy.wait() if wait else copy.start()

        def state(u: int = u, words: dict[str, Array] = words) -> None:
            S, at = x.states[u + 1], x.S_last.at[words["slot"], pl.ds(entry.group * p.heads, p.heads)]
            if not whole:
                S, ref = getattr(x, f"S_stage{u}"), S
                if not wait:
                    for i, value in enumerate(p.values):
                        key = p.keys[i // p.R]
                        S[i] = ref[i, key.low : key.high, value.low : value.high]
            copy = pltpu.make_async_copy(S, at, x.S_sent.at[u])
            copy.wait() if wait else copy.start()

        def unchanged(u: int = u, words: dict[str, Array] = words) -> None:
            at = x.S_last.at[words["slot"], pl.ds(entry.group * p.heads, p.heads)]
            copy = pltpu.make_async_copy(x.S_first[u].at[0], at, x.S_sent.at[u])
            copy.start()
            copy.wait()  # what it is sent from is about to be filled again

        if u == p.U - 1:
            o()
        else:
            pl.when(entry.words[u + 1]["flags"] & tb.FRESH != 0)(o)
        last, empty = words["flags"] & tb.LAST != 0, words["begin"] == words["end"]
        pl.when(last & ~empty if p.starts else last)(state)
        if p.starts and not wait:
            pl.when(last & empty)(unchanged)


def _has(p: Pipeline, name: str) -> bool:
    """Whether the kernel has such an operand: q, k, v are read once more where ``advance`` takes them as they are."""
    if name in ("b", "w"):
        return p.widths.erase > 0 if name == "b" else p.widths.write > 1
    if name in ("v", "v_late"):
        return p.keeps_values is (name == "v")
    return not (p.by_channel or p.changes_keys) if name in ("q_late", "k_late") else True


def _fill_windows(p: Pipeline, x: SimpleNamespace, first: Array) -> None:
    """The step's tokens in float32, behind the last ones of the step before, or what came before the sequence."""
    tokens = p.U * C
    windows = [(getattr(x, f"{name}_window"), getattr(x, f"{name}_past"), getattr(x, name)) for name in "qkv"]
    for window, _, _ in windows:
        window[:, : inside.HISTORY] = window[:, tokens : tokens + inside.HISTORY]

    @pl.when(first)
    def _() -> None:
        for window, past, _ in windows:
            for h in range(window.shape[0]):
                window[h, : inside.HISTORY] = past[0, :, h * C : (h + 1) * C]

    for window, _, now in windows:
        for h in range(window.shape[0]):
            window[h, inside.HISTORY :] = now[0, :, h * C : (h + 1) * C].astype(F32)


def _fill_window_of_chunk(p: Pipeline, x: SimpleNamespace, u: int, part: Part) -> None:
    """A chunk's block in float32, behind the last tokens of the chunk before it, which is the block before it if both
    are of one sequence; where a sequence begins in it, what came before that lies in front of its first token."""
    rows = inside.HISTORY + C
    for name in "qkv":
        window, last, now = x.windows[name][u][0], x.windows[name][u - 1][0], getattr(x, f"{name}{u}")
        window[:, : inside.HISTORY] = last[:, C:rows]
        for h in range(window.shape[0]):
            window[h, inside.HISTORY :] = now[0, :, h * C : (h + 1) * C].astype(F32)

    @pl.when(part.first)
    def _() -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, C), 0)
        for name in "qkv":
            window = x.windows[name][u][0]
            for h in range(window.shape[0]):
                before = jnp.zeros((rows, C), F32)
                if p.starts:
                    past = getattr(x, f"{name}_past{u}")[0, :, h * C : (h + 1) * C]
                    before = pltpu.roll(jnp.concatenate([past, jnp.zeros((C, C), F32)], 0), part.begin, 0)
                window[h] = jnp.where(row < inside.HISTORY + part.begin, before, window[h])


def _now(p: Pipeline, entry: Array) -> Array:
    """What ``scores`` works on in a grid step: row, group and step of a sequence in one number, the last one twice."""
    return jnp.minimum(entry, p.entries - 1)


def _late(entry: Array) -> Array:
    """What ``advance`` works on; in the first step it is the first, on scratch that holds nothing yet, and again in the
    second, when it holds what it should."""
    return jnp.maximum(entry - 1, 0)


class Channels(NamedTuple):
    """q, k or v: an array whose last axis holds its channels, from the given one on; heads side by side."""

    array: Array
    first: int


class GateOperands(NamedTuple):
    """g: log decay, or the gate's raw projection; b: beta, or erase gates; w: write gates. As many a head as the widths
    say [B, T, HV n], float32 or, by channel, any float; None where they say 0, or w is b. parameters of the gate, where
    it is inside: A_log and dt_bias of each decay [2, HV n] float32, or by channel exp(A_log) and dt_bias.
    """

    g: Array
    b: Array | None
    w: Array | None
    parameters: Array | None


def forward(
    p: Pipeline,
    q: Channels,
    k: Channels,
    v: Channels,
    gates: GateOperands,
    S: Array | None,
    cu_seqlens: Array | None = None,
    *,
    taps: tuple[Channels, Channels, Channels] | None = None,
    past: tuple[Channels, Channels, Channels] | None = None,
    dtype: Any,
    interpret: Any = False,
) -> tuple[Array, Array, dict[str, Array]]:
    """The rule, and before it what the plan has inside.

    Args:
        p: the plan.
        q, k, v: [B, T, channels]; bfloat16 q and k, unless there is a norm or a convolution before them, or products
            round nothing.
        gates: see there.
        S: states that the sequences start from, [B or N, HV, K, V] float32; of packed ones None for zeros.
        cu_seqlens: [N + 1], where sequences are packed.
        taps: of q, k and v, [``inside.tap_rows``, channels] float32.
        past: the 8 inputs before the first of each sequence, of q, k and v, [B or N, 8, channels] float32.
        dtype: of o.
        interpret: False, True (generic) or ``pltpu.InterpretParams``.

    Returns:
        o [B, T, HV, V], the final states, and what the plan keeps of each chunk: S, the state before it, [B, chunks of
        a row, HV, K, V] or [1, entries of the table, HV, K, V]; and M, u, and Aqk without scale, [B, chunks, HV,
        summands, 128, 128] bfloat16.
    """
    keys, values = p.P * p.K, p.heads * p.V
    tokens, units = (C, range(p.U)) if p.packed else (p.U * C, [None])
    now = partial(_now, p)

    def where(u: int | None, when: Any, part: Array, entry: Array, *table: Any) -> tuple[Array, ...]:
        """Row, group of heads, block of tokens and state of what a grid step of one of the cores' parts works on."""
        at = when(entry)
        rest, step = lax.div(at, jnp.int32(p.steps)), lax.rem(at, jnp.int32(p.steps))
        rest = rest + part * (p.entries // p.steps)
        row, group = lax.div(rest, jnp.int32(p.groups)), lax.rem(rest, jnp.int32(p.groups))
        if u is None:
            return row, group, step, row
        words = (step * p.U + u) * tb.WORDS
        return row, group, table[0][words + tb.BLOCK], table[0][words + tb.SLOT]

    operands: dict[str, tuple[Array, pl.BlockSpec]] = {}

    def block(name: str, array: Array, shape: tuple[int, ...], when: Any, place: Any, many: bool = True) -> None:
        """An operand, and which block of it a grid step gets; of packed sequences each of its chunks gets one."""
        for u in units if many else units[:1]:
            index = lambda *at, u=u: place(*where(u, when, *at))  # noqa: E731
            operands[name if u is None or not many else f"{name}{u}"] = array, pl.BlockSpec(shape, index)

    def channels(name: str, x: Channels, width: int, rows: int, when: Any, place: Any, many: bool = True) -> None:
        """A block of ``width`` channels; where they do not begin at a multiple of it, they are cut out before."""
        array, first = x
        if first % width:
            array, first = lax.slice_in_dim(array, first, first + p.groups * width, axis=-1), 0
        shape = (rows, width) if array.ndim == 2 else (1, rows, width)
        block(name, array, shape, when, lambda r, h, c, n: place(r, h + first // width, c, n), many)

    widths = {"q": keys, "k": keys, "v": values}
    sequence = lambda r, h, c, n: (r, c, h)  # noqa: E731
    for number, (name, x) in enumerate((("q", q), ("k", k), ("v", v))):
        if _has(p, name):
            channels(name, x, widths[name], tokens, now, sequence)
        if _has(p, f"{name}_late"):
            channels(f"{name}_late", x, widths[name], tokens, _late, sequence)
        if p.inside.width:
            assert taps is not None
            assert past is not None
            rows = taps[number].array.shape[0]
            channels(f"{name}_taps", taps[number], widths[name], rows, now, lambda r, h, c, n: (0, h), many=False)
            if p.starts or not p.packed:
                channels(f"{name}_past", past[number], widths[name], inside.HISTORY, now, lambda r, h, c, n: (n, 0, h))
    for name, a, width in (("g", gates.g, p.widths.decay), ("b", gates.b, p.widths.erase), ("w", gates.w, p.V)):
        if not _has(p, name):
            continue
        if p.by_channel and width > 1:
            channels(name, Channels(a, 0), p.heads * width, tokens, now, sequence)
            continue
        rows = jnp.reshape(jnp.swapaxes(a, 1, 2), (p.B, p.groups, p.heads * width, p.T))
        block(name, rows, (1, 1, p.heads * width, tokens), now, lambda r, h, c, n: (r, h, 0, c))
    if gates.parameters is not None and p.by_channel:
        channels("gate", Channels(gates.parameters, 0), p.heads * p.K, 2, now, lambda r, h, c, n: (0, h), many=False)
    elif gates.parameters is not None:
        columns = jnp.reshape(gates.parameters.T, (p.groups, p.heads * p.decays, 2))
        block("gate", columns, (1, p.heads * p.decays, 2), now, lambda r, h, c, n: (h, 0, 0), many=False)
    if p.starts or not p.packed:
        block("S_first", S, (1, p.heads, p.K, p.V), _late, lambda r, h, c, n: (n, h, 0, 0))

    HV = p.groups * p.heads
    index = lambda place: lambda *at: place(*where(None, _late, *at))  # noqa: E731
    array = pltpu.HBM if p.packed else jax.ShapeDtypeStruct  # what is sent by hand is not to lie in VMEM
    state = array((p.N or p.B, HV, p.K, p.V), F32)
    scratch = _scratch(p, widths, dtype)
    if p.packed:
        outputs = {"o": pl.BlockSpec(memory_space=pltpu.HBM), "S_last": pl.BlockSpec(memory_space=pltpu.HBM)}
        o_shape = (p.blocks * C, HV * p.V)  # whole blocks, since they are sent as such
        prefetched = {"table": tb.chunk_table(p, cu_seqlens)}
    else:
        outputs, prefetched = {}, {}
        outputs["o"] = pl.BlockSpec((1, tokens, values), index(sequence))
        outputs["S_last"] = pl.BlockSpec((1, p.heads, p.K, p.V), index(lambda r, h, c, n: (r, h, 0, 0)))
        o_shape = (p.B, p.T, HV * p.V)
    shapes = [array(o_shape, dtype), state]
    chunks = p.chunks if p.whole_steps else p.blocks + max(p.N - 1, 0)
    for name in p.keeps:
        inner, of = ((p.K, p.V), F32) if name == "S" else ((p.summands, C, C), BF16)
        rest = (0,) * len(inner)
        place = index(lambda r, h, c, n, rest=rest: (r, c, h, *rest))
        outputs[f"{name}_kept"] = pl.BlockSpec((1, p.U, p.heads, *inner), place)
        shapes.append(jax.ShapeDtypeStruct((p.B, chunks, HV, *inner), of))
    slots = channel_phases.slot_shapes(p) if p.by_channel else slot_shapes(p)
    o, final, *found = pallas_call(
        partial(_kernel, p, (*prefetched, *operands, *outputs, *scratch)),
        name="gated_delta_rule_pipeline",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(p.parts, p.entries + 1),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=list(outputs.values()),
            scratch_shapes=[*scratch.values(), *slots * p.U],
        ),
        out_shape=result_shapes(shapes, v.array),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=p.vmem),
        interpret=interpret,
    )(*prefetched.values(), *(array for array, _ in operands.values()))
    return jnp.reshape(o[: p.T] if p.packed else o, (p.B, p.T, HV, p.V)), final, dict(zip(p.keeps, found, strict=True))


def _scratch(p: Pipeline, widths: dict[str, int], dtype: Any) -> dict[str, Any]:
    """Scratch beside the slots, by name."""
    found: dict[str, Any] = {}
    state = pltpu.VMEM((p.heads, p.key_lanes, p.value_lanes), F32)
    tokens, units = (C, range(p.U)) if p.packed else (p.U * C, [""])
    for u in units:
        found[f"S{u}"] = state
        if p.inside.width:
            for name, width in widths.items():
                found[f"{name}_window{u}"] = pltpu.VMEM((width // C, inside.HISTORY + tokens, C), F32)
        if p.packed:
            found[f"stage{u}"] = pltpu.VMEM((C, p.heads * p.V), dtype)
            if not all(span.whole for span in (*p.keys, *p.values)):
                found[f"S_stage{u}"] = pltpu.VMEM((p.heads, p.K, p.V), F32)
    if p.packed:
        found |= {"o_sent": pltpu.SemaphoreType.DMA((p.U,)), "S_sent": pltpu.SemaphoreType.DMA((p.U,))}
    return found
