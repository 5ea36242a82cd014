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
from ..spec.precision import Rounding, rounded_product, stored_states
from ..spec.problem import Problem, Signature

__all__ = ["ILL_CONDITIONED", "Expectation", "Verdict", "allowance", "evaluated", "expect", "judge", "second_look"]

EPS = 2.0**-23
SEEDS = 8
MANY_SEEDS = 256
HOPELESS = 30  # budgets, beyond which no order of sums explains an error
ILL_CONDITIONED = 0.1  # where declared roundings alone move a result by this much, it says nothing about a backend

Tensors = dict[str, np.ndarray]


class Expectation(NamedTuple):
    """Exact results and the norms, by tensor and head, of what may separate a backend from them.

    E: the median of 8 runs; ``largest``: computes the largest of many, once.
    """

    exact: Tensors
    u: Tensors
    E: Tensors
    floor: Tensors
    largest: Callable[[], Tensors]

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
    if name in ("qkv", "conv_weight", "conv_bias", "conv_state") or (s.conv is not None and name in ("q", "k", "v")):
        return np.sqrt((x * x).sum()).reshape(1)
    if name == "dt_bias":
        x, axis = x.reshape(s.HV, -1), 0
    elif name == "A_log":
        axis = 0
    elif name in ("state", "initial_state") or s.step:
        axis = 1
    else:
        axis = 2
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

    def errors(seed: int) -> Tensors:
        rng = np.random.Generator(np.random.Philox(seed))
        if rounding.exact:
            order = AnotherOrder(rng, rounding.base2, anywhere=seed >= SEEDS)
            run = evaluated(problem, cotangents, chunk_by_chunk(rounding.chunk_size, order=order), np.float32)
        else:
            rule = chunk_by_chunk(
                rounding.chunk_size, rounded_product(rounding, rng), stored=stored_states(rounding, rng)
            )
            run = evaluated(problem, cotangents, rule)
        found = tensors(run, s)
        return {name: by_head(name, found[name].astype(np.float64) - x, s) for name, x in truth.items()}

    few = [errors(seed) for seed in range(SEEDS)]

    @cache
    def largest() -> Tensors:
        runs = [*few, *(errors(seed) for seed in range(SEEDS, MANY_SEEDS))]
        return {name: np.fmax.reduce([run[name] for run in runs]) for name in truth}

    return Expectation(
        truth, u, {name: np.median([run[name] for run in few], axis=0) for name in truth}, floor, largest
    )


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
