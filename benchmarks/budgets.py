"""Whether a sound float32 computation stays within its budget whatever the order of its sums.

Cases are drawn to be of the difficult kind: short, few value channels, strong decays, padded. The stages compute each
in other orders than those that the budget was made from. Printed are the results (one head of one tensor of one run)
beyond the first budget and beyond the second (``portable_gdn.harness.judge``), the largest share of the second that
was used, and how much wider the second is.

    python benchmarks/budgets.py --cases 300
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from portable_gdn.harness.cases import Case, build
from portable_gdn.harness.judge import ILL_CONDITIONED, by_head, tensors
from portable_gdn.harness.properties import GATES, KEYS, VARIANTS
from portable_gdn.harness.truth import Truth
from portable_gdn.spec.evaluate import AnotherOrder, chunk_by_chunk, evaluate
from portable_gdn.spec.precision import Rounding


def draw(rng: np.random.Generator) -> Case:
    """A case of the difficult kind."""
    pick = lambda xs: xs[rng.integers(len(xs))]  # noqa: E731
    (keys, beta), H = pick(KEYS), int(rng.integers(1, 3))
    case = Case(
        "drawn", pick(VARIANTS), T=int(rng.integers(1, 100)), B=int(rng.integers(1, 3)), H=H,
        HV=H * int(rng.integers(1, 3)), K=2 * int(rng.integers(2, 9)), V=int(rng.integers(1, 9)),
        gates=pick((*GATES, "strong", "strong", "mild")), keys=keys, beta="1" if beta == "1.998" else beta,
        layout=pick(("rows", "segments", "left padding", "right padding", "holes")), state=bool(rng.integers(2)),
        l2norm=bool(rng.integers(2)), gate=pick((None, None, "softplus", "bounded")), seed=int(rng.integers(2**20)),
    )  # fmt: skip
    return replace(case, gate=None) if case.variant in ("DeltaNet", "linear attention") else case


def shares(case: Case, runs: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Of every tensor: shares of the first and the second budget [runs, heads], and the ratio of the two [heads]."""
    truth = Truth(build(case))
    s, first = truth.problem.signature, truth.expectation(Rounding())
    budget = lambda e, name: 3 * (e.u[name] + e.E[name]) + e.floor[name]  # noqa: E731
    budgets = {name: (budget(first, name), budget(first.widest(), name)) for name in first.exact}
    found: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    off: dict[str, list[np.ndarray]] = {name: [] for name in budgets}
    for seed in range(runs):
        order = AnotherOrder(np.random.default_rng(1000 + seed), anywhere=bool(seed % 2))
        run = tensors(evaluate(truth.problem, truth.cotangents, chunk_by_chunk(order=order), np.float32), s)
        for name in off:
            off[name].append(by_head(name, run[name].astype(np.float64) - first.exact[name], s))
    for name, (narrow, wide) in budgets.items():
        judged = first.E[name] <= ILL_CONDITIONED * by_head(name, first.exact[name], s)
        judged &= narrow > 0
        wide = np.maximum(narrow, wide)
        for into, value in zip(
            found, (np.array(off[name]) / narrow, np.array(off[name]) / wide, wide / narrow), strict=True
        ):
            into.append(value[..., judged])
    return found


def main() -> None:
    """Draw, compute, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--runs", type=int, default=40, help="orders a case")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    columns: tuple[list[np.ndarray], ...] = ([], [], [])
    with np.errstate(all="ignore"):
        for _ in range(options.cases):
            for into, found in zip(columns, shares(draw(rng), options.runs), strict=True):
                into += [value.ravel() for value in found]
    first, second, ratio = map(np.concatenate, columns)
    at = ", ".join(f"{share:.0%}: {np.quantile(ratio, share):.2f}" for share in (0.1, 0.5, 0.9, 0.99))
    print(f"{len(first)} results of {options.cases} cases")
    print(
        f"beyond the first budget: {np.sum(first > 1)} ({np.mean(first > 1):.1e}), the farthest {first.max():.1f} times"
    )
    print(f"beyond the second: {np.sum(second > 1)}, the farthest uses {second.max():.2f} of it")
    print(f"the second is wider by, quantiles: {at}")


if __name__ == "__main__":
    main()
