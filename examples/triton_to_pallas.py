"""Port a Triton kernel to Pallas in two steps, and prove each: a gated delta rule token by token, then in chunks.

python examples/triton_to_pallas.py              # all three kernels, interpreted on a CPU
python examples/triton_to_pallas.py --compile    # and the schedules that the compiler for a TPU v6e makes
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on a CPU, as numpy
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton
import triton.language as tl
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import portable_gdn as pg

C = 64  # tokens in a chunk
dot = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@triton.jit
def in_triton(q, k, v, g, beta, o, T, K: tl.constexpr, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per head; its state [K, V] stays in registers. Arrays are [heads, T, channels]."""
    first = tl.program_id(0) * T
    channels, values = tl.arange(0, K), tl.arange(0, V)
    S = tl.zeros((K, V), tl.float32)
    for t in range(first, first + T):
        key = tl.load(k + t * K + channels)
        S *= tl.exp(tl.load(g + t))
        new = tl.load(v + t * V + values) - tl.sum(S * key[:, None], 0)
        S += (tl.load(beta + t) * key)[:, None] * new[None, :]
        tl.store(o + t * V + values, tl.sum(S * tl.load(q + t * K + channels)[:, None], 0))


def token_by_token(q: Any, k: Any, v: Any, g: Any, beta: Any, o: Any, S: Any) -> None:
    """That program in Pallas. A grid step takes C tokens; the state stays in VMEM until the next step."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        S[...] = jnp.zeros_like(S)

    def token(t: Any, _: Any) -> None:
        row = pl.ds(t, 1)
        key = k[row].T
        decayed = jnp.exp(g[row]) * S[...]
        new = v[row] - jnp.sum(decayed * key, 0, keepdims=True)
        S[...] = decayed + beta[row] * key * new
        o[row] = jnp.sum(S[...] * q[row].T, 0, keepdims=True)

    jax.lax.fori_loop(0, C, token, None)


def in_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, o: Any, S: Any) -> None:
    """What a TPU wants: C tokens at once, as products for the matrix unit."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        S[...] = jnp.zeros_like(S)

    row, column = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    G = dot((row >= column).astype(jnp.float32), g[...])  # sums of log decays, [C, 1]
    D = jnp.exp(jnp.where(row >= column, G - G.T, -jnp.inf))  # what is left of token j at token i
    A = jnp.where(row > column, beta[...] * dot(k[...], k[...].T) * D, 0)
    inverse = (row == column).astype(jnp.float32)  # (1 + A)^-1 of blocks of 1 token, then of 2, 4, ... C
    for size in (2**level for level in range(C.bit_length() - 1)):
        corner = jnp.where((row // size % 2 == 1) & (row // size - 1 == column // size), A, 0)
        inverse -= dot(dot(inverse, corner), inverse)
    new = dot(inverse, beta[...] * (v[...] - jnp.exp(G) * dot(k[...], S[...])))
    o[...] = jnp.exp(G) * dot(q[...], S[...]) + dot(dot(q[...], k[...].T) * D, new)
    S[...] = jnp.exp(G[-1:]) * S[...] + dot((k[...] * jnp.exp(G[-1:] - G)).T, new)


def call(kernel: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, interpret: bool = True) -> jax.Array:
    """A kernel of this file over [heads, T, channels]; gates are [heads, T, 1]. T is a multiple of C."""
    heads, T, K, V = *q.shape, v.shape[-1]
    block = lambda width: pl.BlockSpec((None, C, width), lambda head, chunk: (head, chunk, 0))  # noqa: E731
    return pl.pallas_call(
        kernel, grid=(heads, T // C), in_specs=[block(K), block(K), block(V), block(1), block(1)], out_specs=block(V),
        out_shape=jax.ShapeDtypeStruct(v.shape, jnp.float32), scratch_shapes=[pltpu.VMEM((K, V), jnp.float32)],
        interpret=interpret,
    )(q, k, v, g, beta)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="show the schedules of the Pallas kernels")
    compiled = parser.parse_args().compile
    heads, T, K, V = 2, 256, 64, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, T, n), np.float32) for n in (K, K, V))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.random((heads, T, 1), np.float32), rng.random((heads, T, 1), np.float32)

    swap = lambda x: np.swapaxes(x, 0, 1)[None]  # noqa: E731 - [heads, T, n] as the [B, T, heads, n] of a call
    exact, _ = pg.gated_delta_rule(swap(q), swap(k), swap(v), swap(g)[..., 0], beta=swap(beta)[..., 0], scale=1.0)
    o = torch.empty(heads, T, V)
    in_triton[(heads,)](*map(torch.from_numpy, (q, k, v, g, beta)), o, T, K, V)
    found = {"Triton": o.numpy(), **{f.__name__: call(f, q, k, v, g, beta) for f in (token_by_token, in_chunks)}}
    for name, outputs in found.items():
        error = np.linalg.norm(swap(np.asarray(outputs)) - exact) / np.linalg.norm(exact)
        print(f"{name:15} differs from the oracle by {error:.1e}")
    if compiled:
        from portable_gdn.tpu import schedule

        shapes = [jax.ShapeDtypeStruct((8, 2048, n), jnp.float32) for n in (128, 128, 128, 1, 1)]
        for kernel in (token_by_token, in_chunks):
            print(kernel.__name__, schedule(partial(call, kernel, interpret=False), *shapes, chip="v6e"), sep="\n")


if __name__ == "__main__":
    main()
