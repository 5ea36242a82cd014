"""What the backward pass keeps on a TPU, and what it costs not to: the compiler's own figures, on this CPU.

    python benchmarks/tpu_memory.py            # docs/tpu-backward.md has the figures
    python benchmarks/tpu_memory.py --mixer    # docs/tpu-layer.md has these

A program is the gradient of layers in a ``lax.scan``, each a call of the rule, or of a mixer, and a sum. Bytes are what
the compiler sets aside beside operands and results (``memory_analysis``), by layer: what eight of them need and four do
not. A mixer is compiled without an output norm, with it, and with the same norm written in JAX behind the call.
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
#: Forms of a mixer, by what becomes of its output.
NORMS = ("no norm", "norm inside", "norm behind, by XLA")

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


def mixers(norm: str, precision: str, again: str, heads: int, dim: int) -> Callable[[Any, Any], Any]:
    """The gradient by the weights [layers, 15, HV V] of GDN mixers on x [B, T, HV V], two value heads a key head."""
    keys = heads * dim

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        q, k, v, z, taps = *(x * w for w in weights[:4]), weights[4:12].reshape(-1, 4)
        raw = x[..., : 2 * heads]
        normed = pg.GatedRMSNorm(weights[12, :dim])
        gate = pg.SoftplusGate(weights[13, : 2 * heads], weights[14, : 2 * heads])
        inside = {"output_norm": normed, "z": z} if norm == "norm inside" else {}
        o, _ = pg.gated_delta_mixer(
            (q[..., :keys], k[..., :keys], v), raw, beta=jax.nn.sigmoid(raw.astype(jnp.float32)),
            conv=pg.ShortConv(taps), gate=gate, num_heads=heads, key_dim=dim, precision=precision,
            backend="pallas", **inside,
        )  # fmt: skip
        if norm == "norm behind, by XLA":
            wide = o.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + normed.eps)
            o = (wide * normed.weight * jax.nn.silu(z.astype(jnp.float32).reshape(o.shape))).astype(o.dtype)
        return x + o.reshape(x.shape), None

    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(WAYS[again](layer), x, weights)[0].astype(jnp.float32))

    return jax.grad(loss)


def temporaries(chip: str, gradient: Callable[[Any, Any], Any], *shapes: tuple[int, ...]) -> int:
    """Bytes that a program needs beside its operands and its result."""
    compiled = compile_for(chip_named(chip), gradient, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    return int(compiled.memory_analysis().temp_size_in_bytes)


def main() -> None:
    """Compile all, and show MiB a layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v6e", choices=sorted(CHIPS))
    parser.add_argument("--precision", default="fast", choices=("fast", "default", "highest"))
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--mixer", action="store_true", help="whole GDN mixers, with twice as many value heads")
    options = parser.parse_args()
    T, H, K, precision = options.seqlen, options.heads, 128, options.precision

    def program_of(column: str, again: str, layers: int) -> tuple[Any, ...]:
        if options.mixer:
            wide = 2 * H * K
            return mixers(column, precision, again, H, K), (layers, 15, wide), (1, T, wide)
        return program(column, precision, again), (layers, 3, K), (1, T, H, K)

    columns = NORMS if options.mixer else ("gdn", "kda")
    table = Table("computed again", *columns, title=f"MiB a layer, {options.chip}, {options.precision}")
    for again in WAYS:
        cells = []
        for column in columns:
            few, many = (temporaries(options.chip, *program_of(column, again, n)) for n in (4, 8))
            cells.append(f"{(many - few) / 4 / 2**20:.0f}")
        table.add_row(again, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
