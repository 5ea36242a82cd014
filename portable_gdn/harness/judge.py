"""How large an error may be, and whether one is larger.

Against the float64 oracle, computed from the inputs as the backend got them. Per tensor and head, in L2 norms:

    budget = 3 (u + E) + 8 eps |summands|

u: rounding of the exact result to the result's dtype. E: the error of the stages when exactly those operands of
products are rounded that the backend declares, or of the stages in float32 where it declares none: the median over 8
seeds, of stochastic rounding or of the order in which float32 sums run, which nobody declares.
The last term, eps = 2^-23, is for results that cancel to nothing: the norm of the summands before they do.

Where an error consists of many small ones, that median tells all. Where one decides (a state of one channel, one key
repeated, a decay whose sum is large), it differs from seed to seed as much as from nothing, and a median of 8 does
not tell how far it goes. So an error beyond the budget is held to another: E is then the largest of 256 runs, in which
chunks begin anywhere. An error of 30 budgets needs no second look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from threadpoolctl import ThreadpoolController

from ..spec.evaluate import AnotherOrder, Evaluation, chunk_by_chunk, evaluate
from ..spec.operands import along
from ..spec.precision import Rounding, rounded_product, stored_outputs, stored_states
from ..spec.problem import Problem, Signature
from .statistics import by_token

__all__ = [
    "ILL_CONDITIONED", "Expectation", "Place", "Verdict", "allowance", "evaluated", "expect", "first_beyond", "judge",
    "only_bfloat16", "second_look",
]  # fmt: skip

EPS = 2.0**-23
SEEDS = 8
MANY_SEEDS = 256
HOPELESS = 30  # budgets, beyond which no order of sums explains an error
ILL_CONDITIONED = 0.1  # where declared roundings alone move a result by this much, it says nothing about a backend

Tensors = dict[str, np.ndarray]


class Expectation(NamedTuple):
    """Exact results and the norms, by tensor and head, of what may separate a backend from them.

    E: the median of 8 runs; ``largest``: computes the largest of many, once. ``tokens``: computes once, of tensors with
    tokens, 3 (u + E) + floor of every token and head, [B, T, heads], with the largest of 8 runs for E.
    """

    exact: Tensors
    u: Tensors
    E: Tensors
    floor: Tensors
    largest: Callable[[], Tensors]
    tokens: Callable[[], Tensors] = dict

    def widest(self) -> Expectation:
        """The largest of many runs for E."""
        return self._replace(E=self.largest())


class Verdict(NamedTuple):
    """One tensor of one case: figures of the head that uses most of its budget, relative to the exact result's norm.

    ``judged`` is False where the case is too ill-conditioned to judge; ``ok`` is then True.
    """

    tensor: str
    error: float
    expected: float
    budget: float
    ok: bool
    judged: bool
    head: int


class Place(NamedTuple):
    """Which token and head of a result is beyond its budget first (of a gradient last, where its fault begins).

    row: of packed sequences the sequence, and token in it; None of the only row.
    """

    token: int
    head: int
    row: int | None
    last: bool

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"{'last' if self.last else 'first'} token beyond its budget: {self.token}, head {self.head}{row}"


def tensors(e: Evaluation, s: Signature) -> Tensors:
    """Results of an evaluation by name: o, state, conv_state, grad_*."""
    found = {"o": e.o}
    if s.output_final_state:
        found["state"] = e.state
        if e.conv_state is not None:
            found["conv_state"] = e.conv_state
    return found | {f"grad_{name}": a for name, a in e.gradients.items()}


def by_head(name: str, x: np.ndarray, s: Signature) -> np.ndarray:
    """L2 norm of each head's part of a tensor, [heads]; tensors without heads count as one."""
    name = name.removeprefix("grad_")
    x = np.asarray(x, np.float64)
    if name in (*along("C"), "norm_weight") or (s.conv is not None and name in ("q", "k", "v")):
        return np.sqrt((x * x).sum()).reshape(1)
    if name == "dt_bias":
        x, axis = x.reshape(s.HV, -1), 0
    elif name == "A_log":
        axis = 0
    elif name in ("state", "initial_state") or s.step:
        axis = 1
    else:
        axis = 2
    if name == "z":  # whose heads' channels may be one axis
        x, axis = x.reshape(-1, s.HV, s.V), 1
    others = tuple(a for a in range(x.ndim) if a != axis)
    return np.sqrt((x * x).sum(others))


def _result_dtype(name: str, problem: Problem) -> Any:
    s = problem.signature
    if name == "o":
        return ml_dtypes.bfloat16 if s.dtype == "bfloat16" else np.dtype(s.dtype)
    if name in ("state", "conv_state"):
        return np.dtype(np.float32)
    return np.asarray(problem.operands[name.removeprefix("grad_")]).dtype


#: numpy's products here are small: a second thread of its BLAS waits, by spinning, ten times as long as it helps.
_BLAS = ThreadpoolController()


def evaluated(problem: Problem, *how: Any) -> Evaluation:
    """``evaluate``, by one thread."""
    with _BLAS.limit(limits=1, user_api="blas"):
        return evaluate(problem, *how)


def expect(
    problem: Problem, cotangents: Mapping[str, Any] | None, rounding: Rounding | None, exact: Evaluation
) -> Expectation:
    """What results may differ by from ``exact``, the oracle's evaluation of the same numpy problem.

    Without a ``rounding``, whose E takes by far the longest to compute, E is 0: what lies within is within any budget.
    """
    s = problem.signature
    truth = tensors(exact, s)
    u = {
        name: by_head(name, x - x.astype(_result_dtype(name, problem)).astype(np.float64), s)
        for name, x in truth.items()
    }
    sizes = {
        "o": exact.sizes["o"],
        "state": exact.sizes["state"],
        **{f"grad_{n}": exact.sizes[n] for n in exact.gradients},
    }
    floor = {name: 8 * EPS * by_head(name, sizes.get(name, x), s) for name, x in truth.items()}
    if rounding is None:
        none = {name: np.zeros_like(x) for name, x in u.items()}
        return Expectation(truth, u, none, floor, lambda: none)

    def run(seed: int) -> Tensors:
        rng = np.random.Generator(np.random.Philox(seed))
        if rounding.exact:
            order = AnotherOrder(rng, rounding.base2, anywhere=seed >= SEEDS)
            found = evaluated(problem, cotangents, chunk_by_chunk(rounding.chunk_size, order=order), np.float32)
        else:
            rule = chunk_by_chunk(
                rounding.chunk_size, rounded_product(rounding, rng), stored=stored_states(rounding, rng)
            )
            found = evaluated(problem, cotangents, rule, np.float64, stored_outputs(rounding, rng))
        return tensors(found, s)

    def errors(seed: int) -> Tensors:
        found = run(seed)
        return {name: by_head(name, found[name].astype(np.float64) - x, s) for name, x in truth.items()}

    few = [errors(seed) for seed in range(SEEDS)]

    @cache
    def largest() -> Tensors:
        runs = [*few, *(errors(seed) for seed in range(SEEDS, MANY_SEEDS))]
        return {name: np.fmax.reduce([run[name] for run in runs]) for name in truth}

    @cache
    def tokens() -> Tensors:
        runs, budgets = [run(seed) for seed in range(SEEDS)], {}
        for name, x in truth.items():
            if by_token(name, x, s) is None:
                continue
            E = np.fmax.reduce([_token_norms(name, found[name].astype(np.float64) - x, s) for found in runs])
            u_token = _token_norms(name, x - x.astype(_result_dtype(name, problem)).astype(np.float64), s)
            budgets[name] = 3 * (u_token + E) + 8 * EPS * _token_norms(name, sizes.get(name, x), s)
        return budgets

    return Expectation(
        truth, u, {name: np.median([run[name] for run in few], axis=0) for name in truth}, floor, largest, tokens
    )


def _token_norms(name: str, x: np.ndarray, s: Signature) -> np.ndarray:
    """L2 norms [B, T, heads] of a tensor with tokens."""
    a = by_token(name, x, s)
    assert a is not None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt((a * a).sum(-1))


def first_beyond(
    name: str, value: np.ndarray, e: Expectation, s: Signature, starts: np.ndarray | None = None
) -> Place | None:
    """Where a result that is beyond its budget begins to be so, of the heads that are; None if it has no tokens.

    A token may be off by what few runs of the declared roundings are there, or by its even share of the head's budget.

    Args:
        starts: of packed sequences, cu_seqlens.
    """
    exact = e.exact[name]
    if value.shape != exact.shape or by_token(name, exact, s) is None:
        return None
    off = _token_norms(name, np.asarray(value, np.float64) - exact, s)
    error = by_head(name, np.asarray(value, np.float64) - exact, s)
    _, budget = allowance(name, error, e)
    may = np.maximum(e.tokens().get(name, 0.0), budget / np.sqrt(off.shape[0] * off.shape[1]))
    beyond = ~(off <= may) & ~(error <= budget)
    if not beyond.any():
        return None
    number = np.broadcast_to(np.arange(off.shape[1]), off.shape[:2])
    row = np.broadcast_to(np.arange(off.shape[0])[:, None], off.shape[:2])
    if starts is not None:
        ends = np.asarray(starts)
        row = np.searchsorted(ends, number, side="right") - 1
        number = number - ends[row]
    last = name.startswith("grad_")
    tokens = np.where(beyond, number[..., None], -1 if last else off.shape[1])
    token = int(tokens.max() if last else tokens.min())
    with np.errstate(invalid="ignore", divide="ignore"):
        used = np.where(tokens == token, np.nan_to_num(off / may, nan=np.inf), -1.0)
    b, t, head = np.unravel_index(int(np.argmax(used)), used.shape)
    several = off.shape[0] > 1 or starts is not None
    return Place(token, int(head), int(row[b, t]) if several else None, last)


def only_bfloat16(value: np.ndarray, exact: np.ndarray) -> bool:
    """Whether all float32 values are such as bfloat16 has, which by chance one of 65,536 is, and exact ones are not."""

    def rounded(a: np.ndarray) -> bool:
        bits = np.ascontiguousarray(a).view(np.uint32)
        return bool(np.all(bits & 0xFFFF == 0) and np.count_nonzero(bits) >= 8)

    return value.dtype == np.float32 and rounded(value) and not rounded(np.asarray(exact, np.float32))


def second_look(error: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Where an error is beyond a budget that the largest of many runs may yet explain."""
    return (error > budget) & (error <= HOPELESS * budget)


def allowance(
    name: str, error: np.ndarray, *expectations: Expectation, beside: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """What is expected of an error, by head, and its budget, which is wider where the error is not within it at once.

    Args:
        error: L2 norms [heads]. expectations: of one side, or of both sides that it lies between.
        beside: what else may separate them.
    """

    def of(sides: Sequence[Expectation]) -> tuple[np.ndarray, np.ndarray]:
        expected = np.sum([e.u[name] + e.E[name] for e in sides], axis=0)
        return expected, 3 * expected + np.sum([e.floor[name] for e in sides], axis=0) + beside

    expected, budget = of(expectations)
    beyond = second_look(error, budget)
    if beyond.any():
        wide = of([e.widest() for e in expectations])
        expected, budget = (
            np.where(beyond, np.maximum(x, y), x) for x, y in zip((expected, budget), wide, strict=True)
        )
    return expected, budget


def judge(name: str, value: np.ndarray, e: Expectation, s: Signature) -> Verdict:
    """One tensor against its budget."""
    exact = e.exact[name]
    if value.shape != exact.shape:
        return Verdict(name, float("inf"), 0.0, 0.0, False, True, 0)
    norm = by_head(name, exact, s)
    error = by_head(name, np.asarray(value, np.float64) - exact, s)
    expected, budget = allowance(name, error, e)
    judged = not np.any(e.E[name] > ILL_CONDITIONED * np.where(norm > 0, norm, np.inf))
    within = error <= budget  # False for NaN
    with np.errstate(invalid="ignore", divide="ignore"):
        used = np.where(error == 0, 0.0, np.where(within | (error > budget), error / budget, np.inf))
    head = int(np.argmax(used))
    unit = norm[head] if norm[head] > 0 else 1.0
    return Verdict(
        name,
        float(error[head] / unit),
        float(expected[head] / unit),
        float(budget[head] / unit),
        bool(np.all(within)) or not judged,
        judged,
        head,
    )
