"""The cases of the proof: designed cases, a pairwise plan, and activations of real model layers.

Each case targets a kind of fault: strong gates and resets, repeated and correlated keys, lengths around a chunk, value
heads that share key heads, states that are not zero, and packed, segmented and padded sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..spec.operands import DIFFERENTIABLE, PER_TOKEN, WITH_TOKENS, without_tokens
from ..spec.problem import GateKind, NormKind, Options
from . import recordings
from .randoms import log, normal, uniform

__all__ = [
    "TOKENS", "Case", "Inputs", "build", "cases_named", "designed", "in_rows", "pairwise", "recorded", "rows_of",
    "strengths",
]  # fmt: skip

#: Operands [B, T, ...], or [B, ...] in a single step.
TOKENS = WITH_TOKENS
#: The kinds of decay; a log decay of -104 or less is a hard reset.
GATES = ("mild", "zero", "half zero", "-3 each", "-20 each", "one -100", "one -1e6", "one -inf", "many resets")
PACKED = {"packed": (37, 1, 64, 90), "packed with empties": (0, 64, 0, 0, 1, 63, 65, 0)}


@dataclass(frozen=True)
class Case:
    """A recipe for one call, from which ``build`` makes the arrays.

    ``variant`` is a name of ``spec.variants``. ``layout`` is "rows", "packed", "packed with empties", "segments", "left
    padding", "right padding", "holes" or "step". ``gate`` is None, "softplus" or "bounded". ``conv`` is the width of a
    short convolution, or None. ``norm`` (only for a mixer) is "silu" or "sigmoid" for an output norm with that gate,
    "alone" for one without a gate, or None. ``essential`` says whether backends that need seconds for each new shape
    run the case in the quick proof.
    """

    name: str
    variant: str = "GDN"
    T: int = 130
    dtype: str = "float32"
    B: int = 1
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 24
    gates: str = "mild"
    keys: str = "random"
    beta: str = "random"
    layout: str = "rows"
    state: bool = True
    state_layout: str = "kv"
    l2norm: bool = False
    gate: str | None = None
    conv: int | None = None
    essential: bool = False
    seed: int = 1
    source: str | None = None  # the file name of a recording, used instead of the recipe
    prefix: str = ""
    norm: str | None = None


class Inputs(NamedTuple):
    """One case as numpy arrays: the operands and options of the call, cotangents, and the outputs of a recording."""

    operands: dict[str, Any]
    options: Options
    cotangents: dict[str, Any]
    recorded: dict[str, Any]
    recorded_by: str


def rows_of(a: np.ndarray, cu_seqlens: Any) -> np.ndarray:
    """Return packed sequences [1, T, ...] as rows [N, length of the longest, ...], padded with zeros."""
    lengths = np.diff(np.asarray(cu_seqlens))
    valid = np.arange(lengths.max(initial=0)) < lengths[:, None]
    rows = np.zeros((*valid.shape, *a.shape[2:]), a.dtype)
    rows[valid] = a[0, : valid.sum()]
    return rows


def in_rows(inputs: Inputs) -> Inputs:
    """Return the call with each packed sequence in a row of its own, padded on the right.

    Calls without packed sequences, and all cotangents, are returned unchanged.
    """
    x = dict(inputs.operands)
    bounds = x.pop("cu_seqlens", None)
    if bounds is None:
        return inputs
    x.setdefault("mask", np.ones((1, bounds[-1]), bool))
    return inputs._replace(operands={name: rows_of(a, bounds) if name in TOKENS else a for name, a in x.items()})


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round through float32, as ml_dtypes did with float64 before its version 0.7, so that inputs never change."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x.astype(dtype)


def _unit(x: np.ndarray, dtype: str) -> np.ndarray:
    """Scale rows to a length just below 1 after rounding: with keys longer than 1, a beta near 2 really diverges."""
    x = x / np.sqrt((x * x).sum(-1, keepdims=True))
    return x * {"float32": 1 - 2.0**-22, "float16": 1 - 2.0**-9, "bfloat16": 1 - 2.0**-6}[dtype]


def _keys(c: Case, shape: tuple[int, ...]) -> np.ndarray:
    own, common = normal(c.seed, "k", shape), normal(c.seed, "k common", (*shape[:1], 1, *shape[2:]))
    if c.keys == "repeated":
        own = np.broadcast_to(common, shape)
    elif c.keys == "correlated 0.9":
        own = np.sqrt(0.1) * own + np.sqrt(0.9) * common
    return _unit(own, c.dtype)


def _decay(c: Case, shape: tuple[int, ...]) -> np.ndarray:
    T = shape[1]
    u = uniform(c.seed, "g", shape)
    g = 0.2 * log(u)  # mean -0.2, exponentially distributed
    if c.gates == "zero":
        g = np.zeros(shape)
    elif c.gates == "half zero":
        g = np.where(uniform(c.seed, "g zero", shape) < 0.5, 0.0, g)
    elif c.gates.endswith(" each"):
        g = np.full(shape, float(c.gates.split()[0]))
    elif c.gates == "strong":
        g = 100 * g  # such large sums that the rounding of one shows if the last values, which must not, decay by it
    elif c.gates.startswith("one"):
        g[:, 2 * T // 3 : 2 * T // 3 + 1] = float(c.gates.split()[1])
    elif c.gates == "many resets":
        g = np.where(uniform(c.seed, "g reset", shape) < 0.08, -np.inf, g)
    return g


def _beta(c: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return uniform(c.seed, name, shape) if c.beta == "random" else np.full(shape, float(c.beta))


def build(c: Case) -> Inputs:
    """Build the arrays of a case."""
    if c.source is not None:
        return _from_recording(c)
    lengths = PACKED.get(c.layout)
    B, T = (1, sum(lengths)) if lengths else (c.B, c.T)
    N = len(lengths) if lengths else B
    x: dict[str, Any] = {}
    if c.conv is None:
        q = normal(c.seed, "q", (B, T, c.H, c.K))
        x["q"] = _round(q if c.l2norm else _unit(q, c.dtype) * np.sqrt(np.sqrt(c.K)), c.dtype)
        k = _keys(c, (B, T, c.H, c.K))
        x["k"] = _round(3 * k if c.l2norm else k, c.dtype)
        x["v"] = _round(normal(c.seed, "v", (B, T, c.HV, c.V)), c.dtype)
    else:
        channels = 2 * c.H * c.K + c.HV * c.V
        x["qkv"] = _round(normal(c.seed, "qkv", (B, T, channels)), c.dtype)
        x["conv_weight"] = normal(c.seed, "conv weight", (channels, c.conv)).astype(np.float32)
        x["conv_bias"] = normal(c.seed, "conv bias", (channels,)).astype(np.float32)
        if c.state:
            x["conv_state"] = normal(c.seed, "conv state", (N, c.conv - 1, channels)).astype(np.float32)
        if c.norm is not None:
            x["norm_weight"] = (1 + normal(c.seed, "norm weight", (c.V,)) / 2).astype(np.float32)
            if c.norm != "alone":
                x["z"] = _round(2 * normal(c.seed, "z", (B, T, c.HV, c.V)), c.dtype)
    n = {"DeltaNet": 0, "linear attention": 0, "GDN": 1, "GLA (scalar)": 1, "tile-grouped": 2}.get(c.variant, c.K)
    if c.gate is not None:
        A = log(1 + 15 * uniform(c.seed, "A_log", (c.HV,)))
        x["A_log"] = (A if c.gate == "softplus" else A / 4).astype(np.float32)
        x["dt_bias"] = (normal(c.seed, "dt_bias", (c.HV, n)) - 3).astype(np.float32)
    lead = (B, T, c.HV)
    if n:
        raw = normal(c.seed, "g raw", (*lead, n)) if c.gate else _decay(c, (*lead, n))
        x["g"] = (raw[..., 0] if n == 1 else raw).astype(np.float32)
    if c.variant == "GDN-2":
        x["erase"] = _beta(c, "erase", (*lead, c.K)).astype(np.float32)
        x["write"] = _beta(c, "write", (*lead, c.V)).astype(np.float32)
    elif not c.variant.startswith(("GLA", "linear")):
        x["beta"] = _beta(c, "beta", lead).astype(np.float32)
    if c.state:
        S = normal(c.seed, "S", (N, c.HV, c.K, c.V)).astype(np.float32)
        x["initial_state"] = S if c.state_layout == "kv" else np.ascontiguousarray(np.swapaxes(S, -1, -2))
    if lengths:
        x["cu_seqlens"] = np.cumsum([0, *lengths], dtype=np.int32)
    if c.layout == "segments":
        x["segment_ids"] = np.cumsum(uniform(c.seed, "segments", (B, T)) < 4 / max(T, 1), axis=1).astype(np.int32)
    if c.layout in ("left padding", "right padding", "holes"):
        x["mask"] = _mask(c, B, T)
        for name in PER_TOKEN:
            if name in x:
                x[name][~x["mask"]] = np.nan  # padding may contain anything
    step = c.layout == "step"
    if step:
        x = without_tokens(x)
    kind = None if c.gate is None else GateKind(None if c.gate == "softplus" else -5.0)
    options = Options(
        output_final_state=True,
        qk_l2norm=c.l2norm,
        gate=kind,
        state_layout=c.state_layout,
        step=step,
        conv_activation="silu" if c.conv else None,
        num_heads=c.H if c.conv else None,
        key_dim=c.K if c.conv else None,
        norm=None if c.norm is None else NormKind(1e-6, None if c.norm == "alone" else c.norm),
    )
    inner = (c.K, c.V) if c.state_layout == "kv" else (c.V, c.K)
    return Inputs(x, options, _cotangents(c, (B, *(() if step else (T,)), c.HV, c.V), (N, c.HV, *inner)), {}, "")


def _mask(c: Case, B: int, T: int) -> np.ndarray:
    pads = (3 + 5 * np.arange(B)) % max(T, 1)
    token = np.arange(T)[None, :]
    if c.layout == "left padding":
        return token >= pads[:, None]
    if c.layout == "right padding":
        return token < T - pads[:, None]
    return uniform(c.seed, "mask", (B, T)) < 0.8


def _cotangents(c: Case, o: tuple[int, ...], state: tuple[int, ...]) -> dict[str, Any]:
    return {"o": _round(normal(c.seed, "do", o), c.dtype), "state": normal(c.seed, "dS", state).astype(np.float32)}


def _from_recording(c: Case) -> Inputs:
    assert c.source is not None
    path = next(p for p in recordings.bundled() if p.name == c.source)
    recording = recordings.load(path)
    x = {name: recording.arrays[c.prefix + name] for name in DIFFERENTIABLE if c.prefix + name in recording.arrays}
    o, state = recording.arrays[c.prefix + "o"], recording.arrays[c.prefix + "state"]
    options = Options(
        scale=float(recording.metadata["scale"]),
        output_final_state=True,
        qk_l2norm=recording.metadata["qk_l2norm"] == "true",
    )
    return Inputs(
        x,
        options,
        _cotangents(c, o.shape, state.shape),
        {"o": o, "state": state},
        f"recorded with transformers {recording.metadata['transformers']}",
    )


def recorded() -> list[Case]:
    """Return cases recorded from layers of real model code on real text.

    Each layer has a whole call, and a second call that continues from a state.
    """
    cases = []
    for path in recordings.bundled():
        essential = path.stem in ("qwen3_next", "kimi_linear")  # one GDN, one KDA; the others have their shapes
        cases.append(Case(f"{path.stem} layer", source=path.name, essential=essential))
        cases.append(Case(f"{path.stem} layer, continued", source=path.name, prefix="step_"))
    return cases


def designed() -> list[Case]:
    """Return the cases of the quick proof."""
    C = Case
    return [
        C("one token", T=1, essential=True),
        C("no tokens", T=0, essential=True),
        C("five tokens", T=5, variant="KDA", dtype="bfloat16"),
        C("one short of a chunk", T=63, variant="GDN-2", dtype="float16"),
        C("a chunk", T=64, variant="tile-grouped", H=2, HV=6, dtype="bfloat16", essential=True),
        C("a chunk and a token", T=65, HV=6, gates="half zero"),
        C("KDA", variant="KDA", HV=6, K=24, V=16, essential=True),
        C("GDN-2", variant="GDN-2", dtype="bfloat16", K=48, V=16, essential=True),
        C("DeltaNet", variant="DeltaNet", dtype="bfloat16", keys="correlated 0.9", essential=True),
        C("GLA", variant="GLA", T=65, essential=True),
        C("GLA, scalar gate", variant="GLA (scalar)", dtype="float16"),
        C("linear attention", variant="linear attention"),
        C("bfloat16, 64 x 96", dtype="bfloat16", K=64, V=96, HV=6, l2norm=True),
        C("float16, 100 x 48", dtype="float16", K=100, V=48),
        C("128 x 128", T=130, H=1, HV=1, K=128, V=128),
        C("256 x 192", T=65, H=1, HV=2, K=256, V=192, dtype="bfloat16"),
        C("two rows, tile-grouped", variant="tile-grouped", T=200, B=2, H=4, HV=4, K=192, V=16),
        *(
            C(f"gates {kind}", gates=kind, T=130, essential=kind in ("one -1e6", "one -inf", "-20 each"))
            for kind in GATES[1:]
        ),
        *(
            C(f"gates {kind}, KDA", variant="KDA", gates=kind, T=130)
            for kind in ("-3 each", "-20 each", "one -1e6", "many resets")
        ),
        C("gates strong, a short chunk", gates="strong", T=70),
        C("gates strong, packed", gates="strong", layout="packed"),
        C("gates strong, right padding, KDA", variant="KDA", gates="strong", layout="right padding", B=2, T=70),
        C("resets, tile-grouped", variant="tile-grouped", gates="many resets", dtype="bfloat16"),
        C("keys correlated 0.9, beta 1", keys="correlated 0.9", beta="1"),
        C("one key, beta 1", keys="repeated", beta="1", gates="zero"),
        C("one key, beta 1.998", keys="repeated", beta="1.998", gates="zero"),
        C("one key, beta 1.998, bfloat16", keys="repeated", beta="1.998", gates="zero", dtype="bfloat16"),
        C("one key, beta 1.998, KDA", variant="KDA", keys="repeated", beta="1.998"),
        C("beta 0", beta="0", T=65),
        C("packed", layout="packed", HV=6, dtype="bfloat16"),
        C("packed with empties", layout="packed with empties", essential=True),
        C("packed with empties, KDA", layout="packed with empties", variant="KDA", gates="many resets"),
        C("segments", layout="segments", B=2, essential=True),
        C("segments, KDA", layout="segments", variant="KDA", B=2, gates="many resets"),
        C("left padding", layout="left padding", B=2, T=65, essential=True),
        C("right padding, GDN-2", layout="right padding", variant="GDN-2", B=2, T=65, dtype="bfloat16"),
        C("holes", layout="holes", B=2, T=65),
        C("states [V, K]", state_layout="vk", T=65, l2norm=True),
        C("no initial state", state=False, T=65, dtype="float16"),
        C("softplus gate", gate="softplus", T=65, HV=6, dtype="bfloat16", l2norm=True),
        C("softplus gate, KDA", gate="softplus", variant="KDA", T=65),
        C("bounded gate, KDA", gate="bounded", variant="KDA", T=65),
        C("mixer", conv=4, gate="softplus", l2norm=True, HV=6, dtype="bfloat16"),
        C("mixer, packed with empties", conv=4, layout="packed with empties", l2norm=True),
        C("mixer, holes and segments", conv=4, layout="holes", B=2, T=65, l2norm=True),
        C(
            "mixer, norm and silu gate",
            T=65,
            conv=4,
            gate="softplus",
            l2norm=True,
            H=1,
            HV=3,
            dtype="bfloat16",
            norm="silu",
            essential=True,
            seed=3,
        ),
        C(
            "mixer, norm and sigmoid gate, packed, KDA",
            variant="KDA",
            conv=4,
            gate="softplus",
            layout="packed with empties",
            l2norm=True,
            norm="sigmoid",
        ),
        C("mixer, norm alone, holes", conv=3, layout="holes", B=2, T=65, l2norm=True, norm="alone"),
        C("mixer step, norm and silu gate", conv=4, gate="softplus", layout="step", T=1, B=3, l2norm=True, norm="silu"),
        C("step", layout="step", T=1, B=3, HV=6, essential=True),
        C("step, KDA, bfloat16", layout="step", T=1, B=3, variant="KDA", dtype="bfloat16", l2norm=True),
    ]


def cases_named(names: Iterable[str]) -> list[Case]:
    """Return the designed and recorded cases with these names, in the order of the cases."""
    wanted = set(names)
    return [case for case in [*designed(), *recorded()] if case.name in wanted]


_FACTORS: dict[str, Sequence[Any]] = {
    "dims": [
        (16, 24),
        (24, 16),
        (48, 96),
        (64, 48),
        (96, 64),
        (100, 128),
        (128, 100),
        (192, 16),
        (256, 192),
        (16, 256),
    ],
    "variant": ["DeltaNet", "GDN", "tile-grouped", "KDA", "GDN-2", "GLA", "GLA (scalar)"],
    "gates": GATES,
    "T": [0, 1, 5, 63, 64, 65, 130, 200],
    "keys": [("random", "random"), ("random", "0"), ("correlated 0.9", "1"), ("repeated", "1"), ("repeated", "1.998")],
    "layout": ["rows", "packed", "packed with empties", "segments", "left padding"],
    "dtype": ["float32", "bfloat16", "float16"],
    "heads": [(1, 1), (2, 6), (4, 4)],
    "state": [True, False],
}


def _plan() -> Iterator[dict[str, Any]]:
    """Yield rows in which any two levels of any two factors meet at least once; greedy and deterministic."""
    names = list(_FACTORS)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(_FACTORS[names[a]]))
        for j in range(len(_FACTORS[names[b]]))
    }
    while open_pairs:
        row: dict[int, int] = {}
        a, i, b, j = min(open_pairs)
        row[a], row[b] = i, j
        for c in range(len(names)):
            if c in row:
                continue

            gains = [
                sum(((x, row[x], c, level) if x < c else (c, level, x, row[x])) in open_pairs for x in row)
                for level in range(len(_FACTORS[names[c]]))
            ]
            row[c] = gains.index(max(gains))
        open_pairs -= {(x, row[x], y, row[y]) for x, y in itertools.combinations(sorted(row), 2)}
        yield {names[c]: _FACTORS[names[c]][level] for c, level in row.items()}


def pairwise() -> list[Case]:
    """Return the pairwise plan over variants, dtypes, lengths, head sizes, heads, gates, keys, layouts and states."""
    cases = []
    for i, row in enumerate(_plan()):
        (K, V), (H, HV), (keys, beta) = row["dims"], row["heads"], row["keys"]
        layout = row["layout"] if row["T"] else "rows"
        shape = f"T={row['T']} {H}/{HV} {K}x{V}"
        name = f"plan {i}: {row['variant']} {row['dtype']} {layout} {shape}, {row['gates']}, {keys}, beta {beta}"
        cases.append(
            Case(
                name,
                row["variant"],
                row["T"],
                row["dtype"],
                1,
                H,
                HV,
                K,
                V,
                row["gates"],
                keys,
                beta,
                layout,
                row["state"],
                essential=i % 3 == 0,
                seed=100 + i,
            )
        )
    return cases


def strengths() -> list[Case]:
    """Return cases for every strength of the gate at every granularity finer than per head.

    A kernel may fail at one strength and hold at the next.
    """
    kinds = ("zero", "-3 each", "-8 each", "-11.5 each", "-20 each", "one -100", "one -1e6", "one -inf")
    return [
        Case(f"strength {kind}, {variant}", variant, 70, H=1, HV=2, gates=kind, seed=300 + i)
        for variant in ("tile-grouped", "KDA", "GDN-2")
        for i, kind in enumerate(kinds)
    ]
