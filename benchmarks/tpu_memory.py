"""What the backward pass keeps on a TPU, and what it costs not to: the compiler's own figures, on this CPU.

    python benchmarks/tpu_memory.py            # docs/tpu-backward.md has the figures

A program is the gradient of layers in a ``lax.scan``, each a call of the rule and a sum. Bytes are what the compiler
sets aside beside operands and results (``memory_analysis``), by layer: what eight of them need and four do not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from portable_gdn.tpu.chips import CHIPS, chip_named
from portable_gdn.tpu.scheduling.compile import compile_for, environment

environment(os.environ)  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import portable_gdn as pg  # noqa: E402
from portable_gdn.tpu.calls import KEPT  # noqa: E402

Layer = Callable[[Any, Any], tuple[Any, None]]

#: How a layer is made to keep less, by what is computed again.
WAYS: dict[str, Callable[[Layer], Layer]] = {
    "nothing": lambda layer: layer,
    "all but the rule": lambda layer: jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(KEPT)),
    "the layer": jax.checkpoint,
}


def program(variant: str, precision: str, again: str) -> Callable[[Any, Any], Any]:
    """The gradient by the weights [layers, 3, K] of layers on x [B, T, H, K]."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        q, k, v = (x * w for w in weights)
        raw = x.astype(jnp.float32)
        g = -jax.nn.softplus(raw if variant == "kda" else raw[..., 0])
        beta = jax.nn.sigmoid(raw[..., 1])
        return x + pg.gated_delta_rule(q, k, v, g=g, beta=beta, precision=precision)[0], None

    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(WAYS[again](layer), x, weights)[0].astype(jnp.float32))

    return jax.grad(loss)


def kept(chip: str, variant: str, precision: str, again: str, layers: int, tokens: int, heads: int, dim: int) -> int:
    """Bytes that the program needs beside its operands and its result."""
    shapes = (layers, 3, dim), (1, tokens, heads, dim)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = compile_for(chip_named(chip), program(variant, precision, again), *args)
    return int(compiled.memory_analysis().temp_size_in_bytes)


def main() -> None:
    """Compile all, and show MiB a layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v6e", choices=sorted(CHIPS))
    parser.add_argument("--precision", default="fast", choices=("fast", "default", "highest"))
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    table = Table("computed again", "GDN", "KDA", title=f"MiB a layer, {options.chip}, {options.precision}")
    for again in WAYS:
        cells = []
        for variant in ("gdn", "kda"):
            at = [
                kept(options.chip, variant, options.precision, again, n, options.seqlen, options.heads, 128)
                for n in (4, 8)
            ]
            cells.append(f"{(at[1] - at[0]) / 4 / 2**20:.0f}")
        table.add_row(again, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
