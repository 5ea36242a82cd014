"""Find where two computations of a call begin to differ: the first stage, chunk, head and token, with the values there.

The first place is the one in the earliest chunk and, within that chunk, in the earliest stage. Errors of stages are
judged like those of results: against 3 (u + E) + 8 eps |summands| per row, chunk and head, where u is the rounding of
the dtype in which the stage is stored, and E is the median error of the specification's stages under the declared
roundings (or in float32 if there are none).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from .. import door
from ..spec import stages as st
from ..spec.chunkwise import ChunkOperands, stage_chunk
from ..spec.evaluate import FLOAT64, AnotherOrder, PowersOf2, decay_base2, matmul
from ..spec.precision import BITS, Rounding, rounded_product, stochastic_round
from ..spec.probe import probe_prepared
from ..spec.problem import Problem, Signature
from ..spec.prologue import Prepared, prepare
from ..spec.stages import STAGES, Algebra
from .cases import Inputs, in_rows
from .compute import Stages
from .judge import EPS, SEEDS, only_bfloat16, second_look

__all__ = [
    "SPECIFICATION", "Parting", "Side", "StageTruth", "at_common_boundaries", "chunk_of", "first_parting",
    "partial_stages", "stage_errors",
]  # fmt: skip

#: The names of the parts of each stage.
PARTS = {
    "decay": ("G", "resets"),
    "scores": ("Akk", "Aqk"),
    "inverse": ("T",),
    "wy": ("U", "W"),
    "state": ("S",),
    "delta": ("Vn",),
    "output": ("o",),
}

Budgets = dict[str, tuple[Any, ...]]

#: The number of runs whose largest error counts if the median of a few is not enough; see ``judge``.
MANY_RUNS = 64


class Side(NamedTuple):
    """One computation: its name, its stages, its declared rounding, and the stages that it derives."""

    name: str
    stages: Stages
    rounding: Rounding
    derived: tuple[str, ...] = ()


class Parting(NamedTuple):
    """The first place where the difference between two sides exceeds the budgets of both.

    ``row`` is the row, or with packed sequences the sequence. ``token`` is the first token of the chunk that exceeds
    its budget, counted in its row; for a state it is the first token that reads it. ``values`` are those of both sides
    and the exact one at that place. ``error``, ``budget`` and ``norm`` are L2 norms over this stage of this row, chunk
    and head: of the difference, of what is allowed, and of the exact stage. ``token_error`` and ``token_budget`` are
    the norms over this token alone. ``worst`` has the token and column of the largest difference, and the three values
    there. ``wrong`` says which sides exceed their own budgets against the exact stage, and ``derived`` which sides
    derive the stage because they never compute it.
    """

    stage: str
    part: str
    row: int
    chunk: int
    head: int
    token: int
    column: int
    values: tuple[float, float, float]
    error: float
    budget: float
    norm: float
    token_error: float
    token_budget: float
    worst: tuple[int, int, tuple[float, float, float]]
    wrong: tuple[bool, bool]
    derived: tuple[bool, bool]
    hint: str = ""

    def sentence(self, a: str, b: str) -> str:
        """Describe the place, the values, and which side is wrong, in sentences."""
        names, (token, column, values) = (a, b), self.worst
        parts = [self.brief(a, b)]
        if self.stage == "state":
            of = "over this state"
        else:
            of = f"over the chunk's {self.part}"
            parts.append(
                f"token {self.token} is the first beyond its budget, with a difference of {self.token_error:.2e} where "
                f"{self.token_budget:.2e} may be"
            )
        parts.append(
            f"{of} it is {self.error:.2e} where {self.budget:.2e} may be and the exact norm is {self.norm:.2e}"
        )
        if (token, column) != (self.token, self.column):
            at = f"column {column}" if self.stage == "state" else f"token {token}, column {column}"
            parts.append(f"the largest lies at {at}: {self._there(names, values)}")
        return "; ".join([*parts, *([self.hint] if self.hint else [])])

    def brief(self, a: str, b: str) -> str:
        """Describe briefly the place, both values and the exact one, and which side is wrong."""
        by = [name for name, derives in zip((a, b), self.derived, strict=True) if derives]
        derived = f" (derived by {' and '.join(by)}: {'its' if len(by) == 1 else 'their'} kernel never forms it)"
        return (
            f"first at stage {self.stage}{derived if by else ''}: {self.part} of row {self.row}, chunk {self.chunk}, "
            f"head {self.head}, token {self.token}, column {self.column}: {self._there((a, b), self.values)}; "
            f"{self.verdict(a, b)}"
        )

    def verdict(self, a: str, b: str) -> str:
        """Say which side is wrong."""
        if all(self.wrong):
            return f"{a} and {b} are both wrong, each beyond its own budget"
        for name, wrong in zip((a, b), self.wrong, strict=True):
            if wrong:
                return f"{name} is wrong"
        return "each is within its own budget of the exact stage, and only their difference is beyond both"

    @staticmethod
    def _there(names: tuple[str, str], values: tuple[float, float, float]) -> str:
        first, second, exact = values
        other = "" if names[1] == SPECIFICATION else f"{names[1]} {second:.9g}, "
        return f"{names[0]} {first:.9g}, {other}exact {exact:.9g}"


#: The name of the other side if a side is compared with the exact stages.
SPECIFICATION = "the specification"


_EXACT = Algebra(xp, matmul)


class StageTruth:
    """The exact stages of a call at one chunk size, and the errors that a declared rounding may cause in them.

    Packed sequences become rows of their own, as in ``cases.in_rows``.
    """

    def __init__(self, inputs: Inputs, chunk: int) -> None:
        inputs = in_rows(inputs)
        options = inputs.options._replace(precision=None, chunk_size=None)
        self.problem: Problem = door.normalise(dict(inputs.operands), options, "numpy")[0]
        self.chunk = chunk
        s, x = self.problem
        self._prepared = prepare(FLOAT64, s, x)
        whole = probe_prepared(_EXACT, s, self._prepared, chunk)
        self.exact = _cropped(whole, s, chunk)
        self.sizes = _cropped(_sizes(whole, s, self._prepared, chunk), s, chunk)
        self._expected: dict[Any, Budgets] = {}

    def expected(self, rounding: Rounding, many: bool = False) -> Budgets:
        """Return E for every part, norms [B, chunks, HV]: the median of a few runs, or the largest of many."""
        key = rounding.key(), many
        if key not in self._expected:
            seeds, of = (MANY_RUNS, np.fmax.reduce) if many else (SEEDS, partial(np.median, axis=0))
            runs = [self._errors(rounding, seed) for seed in range(seeds)]
            self._expected[key] = {
                name: tuple(
                    None if part is None else of([run[name][i] for run in runs]) for i, part in enumerate(parts)
                )
                for name, parts in self.exact.items()
            }
        return self._expected[key]

    def expected_by_token(self, rounding: Rounding, name: str, i: int) -> np.ndarray:
        """Return E for one part by token (row of the part), [B, chunks, HV, C]: the largest of a few runs."""
        exact = self.exact[name][i]
        runs = [self._seeded(rounding, seed)[name][i] for seed in range(SEEDS)]
        return np.fmax.reduce([_rows(run - exact) for run in runs])

    def _seeded(self, rounding: Rounding, seed: int) -> Stages:
        return self._run(rounding, np.random.Generator(np.random.Philox(seed)))

    def _errors(self, rounding: Rounding, seed: int) -> Budgets:
        run = self._seeded(rounding, seed)
        return {
            name: tuple(None if part is None else _norms(run[name][i] - part) for i, part in enumerate(parts))
            for name, parts in self.exact.items()
        }

    def _run(self, rounding: Rounding, rng: np.random.Generator) -> Stages:
        s = self.problem.signature
        if not rounding.exact:
            # Queries and keys may be rounded once, before all products; the gates then multiply the rounded values.
            p = self._prepared
            p = p._replace(q=_rounded(p.q, "q", rounding, rng), k=_rounded(p.k, "k", rounding, rng))
            found = probe_prepared(Algebra(xp, rounded_product(rounding, rng)), s, p, self.chunk)
            return _cropped(found, s, self.chunk)
        p, back = _shuffled(prepare(xp, *self.problem), s, rng)
        product = AnotherOrder(rng).product
        algebra = Algebra(xp, product)
        stages: Any = st
        if rounding.base2:
            algebra = Algebra(PowersOf2(), product)
            stages = SimpleNamespace(**{**{name: getattr(st, name) for name in STAGES}, "decay": decay_base2})

        def chunk(x: ChunkOperands) -> Any:
            return stage_chunk(algebra, x, s.scale, stages)

        with np.errstate(invalid="ignore", over="ignore"):
            found = probe_prepared(Algebra(xp, product), s, p, self.chunk, chunk)
        G, count = found["decay"]
        if rounding.base2:
            G = G / np.float32(1 / np.log(2))
        if s.groups == s.K > 1:
            G, count = G[..., back], count[..., back]
        U, W = found["wy"]
        before, after = (S[..., back, :] for S in found["state"])
        found |= {"decay": (G, count), "wy": (U, None if W is None else W[..., back]), "state": (before, after)}
        return _cropped(found, s, self.chunk)


def _rounded(a: np.ndarray, name: str, rounding: Rounding, rng: np.random.Generator) -> np.ndarray:
    kept = rounding.operands.get(name, "float32")
    return a if kept == "float32" else stochastic_round(a, BITS[kept], rng)


def _shuffled(p: Prepared, s: Signature, rng: np.random.Generator) -> tuple[Prepared, np.ndarray]:
    """Shuffle the key channels of the operands, keeping groups together, so that float32 sums run in another order."""
    K = s.K
    width = K if s.groups in (0, 1, K) else K // s.groups
    order = (np.arange(0, K, width)[:, None] + rng.permutation(width)).ravel()
    last = lambda a: a if a is None or a.shape[-1] != K else a[..., order]  # noqa: E731
    return p._replace(
        q=last(p.q),
        k=last(p.k),
        g=last(p.g) if s.groups == K else p.g,
        b=last(p.b),
        S=None if p.S is None else p.S[:, :, order],
    ), np.argsort(order)


def _cropped(stages: Stages, s: Signature, chunk: int) -> Stages:
    """Set the padding of each row's last chunk to zeros, and join the states into one array, [B, chunks + 1, ...]."""
    count = -(-s.T // chunk)
    valid = (np.arange(count * chunk) < s.T).reshape(1, count, 1, chunk)
    found: Stages = {}
    for name, parts in stages.items():
        if name == "state":
            before, after = (np.asarray(a) for a in parts)
            found[name] = (np.concatenate([before, after[:, -1:]], 1),)
            continue
        kept: list[np.ndarray | None] = []
        for part in parts:
            if part is None:
                kept.append(None)
                continue
            a = np.where(valid[..., None], np.asarray(part), np.zeros((), np.asarray(part).dtype))
            if name in ("scores", "inverse"):
                a = np.where(valid[..., None, :], a, np.zeros((), a.dtype))
            kept.append(a)
        found[name] = tuple(kept)
    return found


def _norms(a: np.ndarray) -> np.ndarray:
    """Return the L2 norms [B, chunks, HV] of [B, chunks, HV, ...]."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.sqrt((np.asarray(a, np.float64) ** 2).sum((-1, -2)))


def _rows(a: np.ndarray) -> np.ndarray:
    """Return the L2 norms [B, chunks, HV, C] of [B, chunks, HV, C, ...]."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.sqrt((np.asarray(a, np.float64) ** 2).sum(-1))


def _sizes(exact: Stages, s: Signature, p: Prepared, chunk: int) -> Stages:
    """Return the sizes of every stage's summands before they cancel, from the exact results of earlier stages."""
    size = lambda a: None if a is None else np.abs(a)  # noqa: E731
    decays = st.Decays(*exact["decay"])
    (_, Aqk), (T,), (U, W) = (exact[name] for name in ("scores", "inverse", "wy"))
    (Vn,), (S, _) = exact["delta"], exact["state"]
    before = np.abs(S)

    def rows(a: np.ndarray | None) -> np.ndarray | None:
        """Reshape [B, T, heads, D] to [B, chunks, HV, C, D]."""
        if a is None:
            return None
        pad = -a.shape[1] % chunk
        a = np.pad(np.abs(a), [(0, 0), (0, pad), (0, 0), (0, 0)])
        a = np.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 3, 2)
        return np.repeat(a, s.HV // a.shape[2], axis=2)

    q, k, v, b, w = (rows(a) for a in (p.q, p.k, p.v, p.b, p.w))
    scale = abs(s.scale)
    after = st.state(_EXACT, k, np.abs(Vn), decays, before)
    return {
        "decay": (np.abs(decays.sum), np.zeros_like(decays.resets)),
        "scores": st.scores(_EXACT, q, k, b, decays, scale),
        "inverse": (size(T),),
        "wy": st.wy(_EXACT, size(T), k, v, b, w, decays),
        "state": (np.concatenate([before[:, :1], after[:, :-1]], 1), after),
        "delta": (np.abs(U) if W is None else np.abs(U) + np.abs(W) @ before,),
        "output": (st.output(_EXACT, q, np.abs(Aqk), np.abs(Vn), decays, before, scale),),
    }


def _may(truth: StageTruth, name: str, i: int, error: np.ndarray, *sides: tuple[Side, np.ndarray]) -> np.ndarray:
    """Return 3 (u + E) + floor, summed over all sides, for one part, [B, chunks, HV].

    As with results, E is the largest of many runs where an error exceeds the budget but is not hopeless.
    """
    exact = truth.exact[name][i]
    assert exact is not None

    def of(many: bool) -> np.ndarray:
        may = np.zeros_like(error)
        for side, value in sides:
            u = _norms(exact - exact.astype(np.asarray(value).dtype).astype(np.float64))
            may += 3 * (u + truth.expected(side.rounding, many)[name][i]) + 8 * EPS * _norms(truth.sizes[name][i])
        return may

    may = of(many=False)
    beyond = second_look(error, may)
    return np.where(beyond, np.maximum(may, of(many=True)), may) if beyond.any() else may


def stage_errors(truth: StageTruth, side: Side) -> dict[str, tuple[float, float]]:
    """Return for each stage the error and the budget of its worst part, chunk and head, relative to the exact part."""
    found = {}
    stages = _cropped(side.stages, truth.problem.signature, truth.chunk)
    for name, parts in stages.items():
        worst = (0.0, 0.0, -1.0)
        for i, value in enumerate(parts):
            exact = truth.exact[name][i]
            if value is None or exact is None:
                continue
            error, norm = _norms(value - exact), _norms(exact)
            may = _may(truth, name, i, error, (side, value))
            with np.errstate(invalid="ignore", divide="ignore"):
                used = np.where(error == 0, 0.0, np.where(error == error, error / may, np.inf))
            at = np.unravel_index(int(np.argmax(used)), used.shape)
            if used[at] > worst[2]:
                unit = norm[at] if norm[at] > 0 else 1.0
                worst = (float(error[at] / unit), float(may[at] / unit), float(used[at]))
        found[name] = worst[:2]
    return found


def partial_stages(stages: Stages) -> bool:
    """Return whether there are only states at chunk borders and outputs."""
    return bool(stages) and set(stages) <= {"state", "output"}


def chunk_of(stages: Stages) -> int:
    """Return the number of tokens per chunk."""
    part = stages["output"][0]
    assert part is not None
    return int(part.shape[-2])


def at_common_boundaries(a: Side, b: Side, tokens: int) -> tuple[Side, Side, int, str]:
    """Bring both sides to one chunk size.

    With chunks of different sizes only outputs, and states at boundaries that both sides have, can be compared.

    Returns:
        Both sides, the chunk size, and a sentence on what had to be left out, or "".
    """
    sizes = [chunk_of(side.stages) for side in (a, b)]
    if sizes[0] == sizes[1]:
        return a, b, sizes[0], ""
    if tokens <= min(sizes):  # each has one chunk, with different padding
        a, b = (side._replace(stages={n: _cut(n, x, min(sizes)) for n, x in side.stages.items()}) for side in (a, b))
        return a, b, min(sizes), ""
    size, borders_only = max(sizes), any(partial_stages(side.stages) for side in (a, b))
    a, b = (side._replace(stages=_joined(side.stages, size)) for side in (a, b))
    left_out = (
        f"{a.name} has chunks of {sizes[0]} tokens and {b.name} of {sizes[1]}: states at common boundaries and outputs "
        "are compared, no other stage"
    )
    if not borders_only:
        left_out += "; with one --chunk-size all are"
    return a, b, size, left_out


def _cut(name: str, parts: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Return the first ``size`` tokens of a stage of one chunk."""
    if name == "state":
        return parts
    columns = size if name in ("scores", "inverse") else None
    return tuple(None if a is None else a[..., :size, :columns] for a in parts)


def _joined(stages: Stages, size: int) -> Stages:
    """Return states and outputs in larger chunks."""
    (before, after), (o,) = stages["state"], stages["output"]
    assert before is not None
    assert after is not None
    assert o is not None
    each = size // o.shape[-2]
    B, chunks, heads, C, V = o.shape
    o = np.moveaxis(np.pad(o, [(0, 0), (0, -chunks % each), (0, 0), (0, 0), (0, 0)]), 2, 3)
    o = np.moveaxis(o.reshape(B, -1, each * C, heads, V), 3, 2)
    before = before[:, ::each]
    return {"state": (before, np.broadcast_to(after[:, -1:], before.shape)), "output": (o,)}


def first_parting(truth: StageTruth, a: Side, b: Side | None = None) -> Parting | None:
    """Find the first place where ``a`` differs from ``b``, or without ``b`` from the exact stages, beyond the budget.

    Both must have been probed in chunks of ``truth.chunk``.

    Returns:
        The place, or None if there is none.
    """
    s, chunk = truth.problem.signature, truth.chunk
    mine = _cropped(a.stages, s, chunk)
    other: Mapping[str, tuple[Any, ...]] = truth.exact if b is None else _cropped(b.stages, s, chunk)
    places: list[tuple[int, int, int, str, int, np.ndarray, np.ndarray]] = []
    for order, name in enumerate(STAGES):
        for i, value in enumerate(mine.get(name, ())):
            against = other[name][i] if name in other else None
            if value is None or against is None or truth.exact[name][i] is None:
                continue
            error = _norms(np.asarray(value, np.float64) - np.asarray(against, np.float64))
            may = _may(truth, name, i, error, (a, value), *([] if b is None else [(b, against)]))
            beyond = ~(error <= may)  # NaN too
            if beyond.any():
                first = int(np.flatnonzero(beyond.any((0, 2)))[0])
                places.append((first, order, i, name, i, error, may))
    if not places:
        return None
    first, _, _, name, i, error, may = min(places, key=lambda place: place[:3])
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = np.where(
            error[:, first] <= may[:, first], 0.0, np.nan_to_num(error[:, first] / may[:, first], nan=np.inf)
        )
    row, head = map(int, np.unravel_index(int(np.argmax(excess)), excess.shape))
    at = (row, first, head)
    values = tuple(np.asarray(x[name][i], np.float64)[at] for x in (mine, other, truth.exact))
    with np.errstate(invalid="ignore"):
        off = np.abs(values[0] - values[1])
    off = np.where(np.isnan(off), np.inf, off)
    worst_line, worst_column = map(int, np.unravel_index(int(np.argmax(off)), off.shape))
    line, column, by_token, allowed = worst_line, worst_column, float(error[at]), float(may[at])
    sides = [(a, mine[name][i]), *([] if b is None else [(b, other[name][i])])]
    if name != "state":
        tokens, budgets = _rows(off), _token_budgets(truth, name, i, at, float(may[at]), sides)
        beyond_token = np.flatnonzero(~(tokens <= budgets))
        line = int(beyond_token[0]) if beyond_token.size else worst_line
        column, by_token, allowed = int(np.argmax(off[line])), float(tokens[line]), float(budgets[line])
    there = lambda line, column: _three(float(x[line, column]) for x in values)  # noqa: E731
    number = lambda line: min(first * chunk + (0 if name == "state" else line), s.T)  # noqa: E731
    return Parting(
        name, PARTS[name][i], row, first, head, number(line), column, there(line, column),
        float(error[at]), float(may[at]), float(_norms(truth.exact[name][i])[at]), by_token, allowed,
        (number(worst_line), worst_column, there(worst_line, worst_column)),
        (_wrong(truth, name, i, at, *sides[0]), b is not None and _wrong(truth, name, i, at, *sides[1])),
        (name in a.derived, b is not None and name in b.derived), _hint(sides, truth, name, i, at),
    )  # fmt: skip


def _three(x: Iterable[float]) -> tuple[float, float, float]:
    a, b, c = x
    return a, b, c


def _token_budgets(
    truth: StageTruth, name: str, i: int, at: tuple[int, int, int], may: float, sides: list[tuple[Side, Any]]
) -> np.ndarray:
    """Return the budget of each token of a chunk and head, [C].

    It is computed like that of the chunk, but is no less than an equal share of the chunk's, because a few runs say
    little about one token.
    """
    exact = np.asarray(truth.exact[name][i])
    least = np.zeros(exact.shape[-2])
    for side, value in sides:
        u = _rows(exact[at] - exact[at].astype(np.asarray(value).dtype).astype(np.float64))
        E = truth.expected_by_token(side.rounding, name, i)[at]
        least += 3 * (u + E) + 8 * EPS * _rows(truth.sizes[name][i][at])
    return np.maximum(least, may / np.sqrt(len(least)))


def _wrong(truth: StageTruth, name: str, i: int, at: tuple[int, int, int], side: Side, value: Any) -> bool:
    """Return whether a side exceeds its own budget against the exact stage."""
    error = _norms(np.asarray(value, np.float64) - np.asarray(truth.exact[name][i], np.float64))
    return not error[at] <= _may(truth, name, i, error, (side, value))[at]


def _hint(sides: list[tuple[Side, Any]], truth: StageTruth, name: str, i: int, at: tuple[int, int, int]) -> str:
    """Return a hint from the values themselves: if bfloat16 can hold all float32 values, they were rounded to it."""
    for side, value in sides:
        if only_bfloat16(np.asarray(value)[at], np.asarray(truth.exact[name][i])[at]):
            return f"every value of {side.name} there is one that bfloat16 can hold: it was rounded to bfloat16"
    return ""
