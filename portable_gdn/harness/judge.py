"""The budget of an error, and the verdict on an error.

Errors are differences from the float64 oracle, which gets the inputs as the backend got them. Each tensor and head has
a budget, in L2 norms:

    budget = 3 (u + E) + 8 eps |summands|

u is the error of rounding the exact result to the result's dtype. E is the error of the stages if exactly those
operands of products are rounded that the backend declares, or of the stages in float32 if it declares none. It is the
median over 8 seeds, which determine the stochastic rounding, or the order of the float32 sums, which no backend
declares. The last term, with eps = 2^-23, is for results that cancel: it is the norm of the summands before they
cancel.

If an error consists of many small ones, that median describes it well. If a single one dominates (a state of one
channel, one key repeated, a decay whose sum is large), it varies between seeds as much as it is large, and a median of
8 does not show how large it can become. An error beyond the budget is therefore compared with a second budget, for
which E is the largest of 256 runs, in which chunks begin anywhere. An error of more than 30 budgets needs no second
look.
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
HOPELESS = 30  # number of budgets above which no order of sums explains an error
ILL_CONDITIONED = 0.1  # if declared roundings alone change a result by this much, it says nothing about a backend

Tensors = dict[str, np.ndarray]


class Expectation(NamedTuple):
    """The exact results of a case, and the norms of the differences that a backend may have, by tensor and head.

    ``E`` is the median of 8 runs. ``largest`` computes the largest of many runs, once. ``tokens`` computes, once and
    for tensors with tokens, 3 (u + E) + floor for every token and head, [B, T, heads], where E is the largest of 8
    runs.
    """

    exact: Tensors
    u: Tensors
    E: Tensors
    floor: Tensors
    largest: Callable[[], Tensors]
    tokens: Callable[[], Tensors] = dict

    def widest(self) -> Expectation:
        """Return this expectation with the largest of many runs as E."""
        return self._replace(E=self.largest())


class Verdict(NamedTuple):
    """The verdict on one tensor of one case.

    Figures are those of the head that uses most of its budget, relative to the norm of the exact result. ``judged`` is
    False if the case is too ill-conditioned to be judged; ``ok`` is then True.
    """

    tensor: str
    error: float
    expected: float
    budget: float
    ok: bool
    judged: bool
    head: int


class Place(NamedTuple):
    """The first token of a result that exceeds its budget, and a head in which it does.

    For a gradient it is the last such token, because the fault of a gradient begins there. For packed sequences ``row``
    is the sequence, and ``token`` counts in it; ``row`` is None if there is only one row.
    """

    token: int
    head: int
    row: int | None
    last: bool

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"{'last' if self.last else 'first'} token beyond its budget: {self.token}, head {self.head}{row}"


def tensors(e: Evaluation, s: Signature) -> Tensors:
    """Return the results of an evaluation by name: o, state, conv_state, grad_*."""
    found = {"o": e.o}
    if s.output_final_state:
        found["state"] = e.state
        if e.conv_state is not None:
            found["conv_state"] = e.conv_state
    return found | {f"grad_{name}": a for name, a in e.gradients.items()}


def by_head(name: str, x: np.ndarray, s: Signature) -> np.ndarray:
    """Return the L2 norm of each head's part of a tensor, [heads]; a tensor without heads counts as one head."""
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
    if name == "z":  # its heads and channels may share one axis
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


#: numpy's products are small here: a second BLAS thread spends ten times as long spinning as it saves.
_BLAS = ThreadpoolController()


def evaluated(problem: Problem, *how: Any) -> Evaluation:
    """Call ``evaluate`` with a single BLAS thread."""
    with _BLAS.limit(limits=1, user_api="blas"):
        return evaluate(problem, *how)


def expect(
    problem: Problem, cotangents: Mapping[str, Any] | None, rounding: Rounding | None, exact: Evaluation
) -> Expectation:
    """Compute how much results may differ from ``exact``, the oracle's evaluation of this numpy problem.

    E takes by far the longest to compute. Without a ``rounding`` it is 0, and a result within that budget is within the
    budget of any rounding.
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
    """Return the L2 norms [B, T, heads] of a tensor with tokens."""
    a = by_token(name, x, s)
    assert a is not None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt((a * a).sum(-1))


def first_beyond(
    name: str, value: np.ndarray, e: Expectation, s: Signature, starts: np.ndarray | None = None
) -> Place | None:
    """Find the place where a result beyond its budget begins to exceed it, in the heads that do.

    A token may have the error that a few runs of the declared roundings have there, or its equal share of the head's
    budget.

    Args:
        name: the name of the tensor.
        value: the result.
        e: the expectation of the case.
        s: the signature of the call.
        starts: cu_seqlens, if sequences are packed.

    Returns:
        The place, or None if the tensor has no tokens.
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
    """Return whether bfloat16 can hold all of these float32 values, though it cannot hold all of the exact ones.

    By chance, bfloat16 can hold one of 65,536 float32 values.
    """

    def rounded(a: np.ndarray) -> bool:
        bits = np.ascontiguousarray(a).view(np.uint32)
        return bool(np.all(bits & 0xFFFF == 0) and np.count_nonzero(bits) >= 8)

    return value.dtype == np.float32 and rounded(value) and not rounded(np.asarray(exact, np.float32))


def second_look(error: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Return where an error exceeds its budget, but not by so much that the largest of many runs cannot explain it."""
    return (error > budget) & (error <= HOPELESS * budget)


def allowance(
    name: str, error: np.ndarray, *expectations: Expectation, beside: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected error of each head and its budget, which is widened where the error exceeds it at first.

    Args:
        name: the name of the tensor.
        error: L2 norms [heads].
        expectations: that of one side, or those of the two sides whose difference is the error.
        beside: a further difference that is allowed.
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
    """Judge one tensor against its budget."""
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
