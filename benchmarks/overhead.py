"""What a short call costs beside its arithmetic: validation and choice, and the framework's own price for any call.

Microseconds, medians. "nothing" is an empty call of the framework with the same operands: for jax a jitted function
with a static argument, for torch a torch.autograd.Function. "door" is our validation and choice alone, for a call whose
like was seen before (its first time: "first"). "backend" is the backend's own function without the door.

jax is asked to compute in the calling thread: handing a small program to another thread and waiting costs tens of
microseconds, which hide everything else and belong to jax (--async leaves it as it is).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

COLUMNS = ("first", "door", "nothing", "backend", "whole", "with gradient")


def operands(T: int, H: int, HV: int, D: int) -> dict[str, np.ndarray]:
    """A GDN call of T tokens; T = 0 stands for the step of one token, which has no dimension of time."""
    rng = np.random.default_rng(0)
    lead = (1, T) if T else (1,)
    return {
        "q": rng.standard_normal((*lead, H, D), np.float32),
        "k": rng.standard_normal((*lead, H, D), np.float32),
        "v": rng.standard_normal((*lead, HV, D), np.float32),
        "g": -rng.exponential(0.1, (*lead, HV)).astype(np.float32),
        "beta": rng.uniform(0, 1, (*lead, HV)).astype(np.float32),
        "initial_state": rng.standard_normal((1, HV, D, D), np.float32),
    }


def measure(contestants: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Median microseconds of one call of each; they take turns, ``calls`` in a row."""
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, f in contestants.items():
            for _ in range(calls):
                start = time.perf_counter()
                f()
                passed = time.perf_counter() - start
                if turn:
                    seen[name].append(1e6 * passed)
    return {name: statistics.median(times) for name, times in seen.items()}


def contestants(library: str, T: int, x: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    """What to time for one library and length."""
    import portable_gdn as pg
    from portable_gdn import door
    from portable_gdn.spec.problem import Options

    step = T == 0
    options = Options(output_final_state=True, qk_l2norm=True, step=step)
    backend = {"jax": "xla", "torch": "torch"}[library]
    a, ready, nothing = {"jax": _jax, "torch": _torch}[library](x)

    def normalised() -> Any:
        return door.normalise(a, options, backend)

    def first() -> Any:
        door._CALLS.clear()
        return normalised()

    def whole(x: dict[str, Any] = a) -> Any:
        q, k, v, g, beta, S = x.values()
        if step:
            return ready(pg.gated_delta_rule_step(q, k, v, g, beta=beta, state=S, qk_l2norm=True, backend=backend))
        return ready(
            pg.gated_delta_rule(
                q, k, v, g, beta=beta, initial_state=S, output_final_state=True, qk_l2norm=True, backend=backend
            )
        )

    problem, chosen = normalised()
    out = {
        "first": first,
        "door": normalised,
        "nothing": nothing,
        "backend": lambda: ready(chosen.run(problem)),
        "whole": whole,
    }
    if library == "torch":  # the price of recording the call for a gradient; nothing is differentiated
        tracked = {name: t.clone().requires_grad_() for name, t in a.items()}
        out["with gradient"] = lambda: whole(tracked)
    return out


def _jax(x: dict[str, np.ndarray]) -> Any:
    import jax
    import jax.numpy as jnp

    a = {name: jnp.asarray(value) for name, value in x.items()}

    @partial(jax.jit, static_argnums=(0, 1))
    def empty(name: str, size: int, operands: dict[str, Any]) -> Any:
        return jnp.zeros_like(operands["v"]), jnp.zeros_like(operands["initial_state"])

    ready: Callable[[Any], Any] = jax.block_until_ready
    return a, ready, lambda: ready(empty("static", 64, a))


def _torch(x: dict[str, np.ndarray]) -> Any:
    import torch

    a = {name: torch.from_numpy(value) for name, value in x.items()}
    values = list(a.values())

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any, scale: float) -> Any:
            return torch.empty_like(v), torch.empty_like(S)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise NotImplementedError

    apply: Callable[..., Any] = Empty.apply
    return a, lambda result: result, lambda: apply(*values, 1.0)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--tokens", type=int, nargs="+", default=[0, 1, 2, 4, 8], metavar="T", help="0 is the step of one token"
    )
    p.add_argument("--key-heads", type=int, default=2, metavar="H")
    p.add_argument("--value-heads", type=int, default=4, metavar="HV")
    p.add_argument("--dim", type=int, default=32, help="key and value channels")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--calls", type=int, default=50, help="calls of each in a round")
    p.add_argument("--libraries", nargs="+", choices=("torch", "jax"), default=["torch", "jax"])
    p.add_argument("--async", action="store_true", dest="hand_over", help="let jax hand programs to another thread")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    a = p.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = os.environ["OMP_NUM_THREADS"] = str(a.threads)
    if "jax" in a.libraries:
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", a.hand_over)
    rows = []
    with Console(stderr=True).status("starting") as status:
        for library in a.libraries:
            for T in a.tokens:
                status.update(f"{library}, T = {T or 'step'}")
                x = operands(T, a.key_heads, a.value_heads, a.dim)
                rows.append({"library": library, "T": T, **measure(contestants(library, T, x), a.rounds, a.calls)})
    if a.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table(title=f"Microseconds a call (H={a.key_heads}, HV={a.value_heads}, K=V={a.dim})")
    for column in ("library", "tokens"):
        table.add_column(column)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[name]:.1f}" if name in row else "" for name in COLUMNS]
        table.add_row(str(row["library"]), str(row["T"] or "step"), *cells, end_section=row["T"] == a.tokens[-1])
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
