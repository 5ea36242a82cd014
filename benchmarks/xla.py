"""The xla backend on a CPU: its own gradient against JAX's of the same forward pass, and what finer decays cost.

    python benchmarks/xla.py            # docs/tile-grouped.md has the figures

Times are the fastest of rounds in which all programs alternate; compare them with each other only. Memory is what the
compiler says a program needs beside operands and results.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from portable_gdn import door
from portable_gdn.backends import xla_chunks
from portable_gdn.backends.xla_backend import chunk_size
from portable_gdn.spec.problem import Options

DECAYS = {"GDN": (), "tile-grouped, n = 2": (2,), "tile-grouped, n = 4": (4,), "KDA": None}


def operands(decays: tuple[int, ...] | None, T: int, H: int, K: int) -> dict[str, Any]:
    """Of a call with as many value heads as key heads."""
    rng = np.random.default_rng(0)
    lead = (1, T, H)
    x = {name: rng.standard_normal((*lead, K)) for name in ("q", "k", "v")}
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    x["g"] = -rng.exponential(0.1, (*lead, *((K,) if decays is None else decays)))
    x["beta"] = rng.random(lead)
    return {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}


def programs(x: dict[str, Any], by_jax: bool) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Compiled, with their arguments: forward, and forward with backward by our rule, and if asked for by JAX's."""
    s = door.normalise(x, Options(), "xla")[0].signature
    call = (s, chunk_size(s))
    d = {"o": jnp.ones_like(x["v"])}
    forward = jax.jit(lambda x: xla_chunks.compute.__wrapped__(*call, x)).lower(x).compile()
    both = lambda: jax.jit(lambda x, d: xla_chunks.compute_gradients.__wrapped__(*call, x, d)).lower(x, d).compile()  # noqa: E731
    found = {"forward": (forward, (x,)), "both": (both(), (x, d))}
    if by_jax:
        with mock.patch.object(xla_chunks, "_rule", xla_chunks._rule.fun):
            found["both by JAX"] = both(), (x, d)
        gradients = [jax.tree.leaves(found[name][0](x, d)[1]) for name in ("both", "both by JAX")]
        for a, b in zip(*gradients, strict=True):
            if not jnp.linalg.norm(a - b) <= 1e-4 * jnp.linalg.norm(b):
                raise SystemExit("the two gradients differ")
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    every = {
        (variant, name): program
        for variant, decays in DECAYS.items()
        for name, program in programs(
            operands(decays, options.tokens, options.heads, options.dim), variant in ("GDN", "KDA")
        ).items()
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in every}
    for _ in range(options.rounds):
        for key, (run, arguments) in every.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times[key].append(time.perf_counter() - begin)
    fastest = {key: 1e3 * min(found) for key, found in times.items()}
    memory = {key: run.memory_analysis().temp_size_in_bytes / 2**20 for key, (run, _) in every.items()}
    print("| | forward, ms | forward + backward, ms | by JAX's rule, ms | MiB | by JAX's rule, MiB |")
    print("|---|---|---|---|---|---|")
    for variant in DECAYS:
        cells = [
            f"{fastest[variant, m]:.0f} ({fastest[variant, m] / fastest['GDN', m]:.2f} x)" for m in ("forward", "both")
        ]
        other = (variant, "both by JAX")
        cells += [f"{fastest[other]:.0f}" if other in every else "", f"{memory[variant, 'both']:.0f}"]
        cells += [f"{memory[other]:.0f}" if other in every else ""]
        print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
