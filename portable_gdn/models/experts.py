"""The MLPs of a mixture of experts, applied to the tokens that the router sends to each.

Three algorithms compute the same result. For few tokens, the matrices of their experts are gathered, so that no other
weights are read. For many, the tokens are sorted by expert and multiplied group by group: on a TPU by JAX's grouped
kernel, because XLA would multiply all tokens by all experts, and elsewhere by ``jax.lax.ragged_dot``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..layers.axes import named
from ..parallel.axes import AxisRules, mesh_axes, partition_spec
from ..tpu.lowering import kernel_or_else
from .numerics import Numerics

__all__ = ["ExpertSplit", "Experts", "expert_split", "grouped_product"]

Array = Any
ROWS = 128
"""The grouped kernel takes so many rows at a time."""


@dataclass(frozen=True)
class ExpertSplit:
    """How experts and their tokens are split over a mesh: the names of its axes."""

    mesh: Any
    rows: tuple[str, ...]
    tokens: tuple[str, ...]
    experts: Any
    columns: Any
    """What splits the columns of the MLPs: a name, several, or None, as ``experts``."""

    def summed(self) -> tuple[str, ...]:
        """The axes over which partial results are added."""
        both = ((part,) if isinstance(part, str) else part or () for part in (self.experts, self.columns))
        return tuple(name for names in both for name in names)

    def placed(self, x: Array) -> Any:
        """How tokens [B, T, ...] lie, as far as the axes divide them."""
        sizes = self.mesh.shape
        fits = [
            names if names and size % math.prod(sizes[n] for n in names) == 0 else None
            for names, size in zip((self.rows, self.tokens), x.shape[:2], strict=True)
        ]
        return jax.sharding.PartitionSpec(*fits)


def expert_split(mesh: Any, rules: AxisRules | None, count: int, size: int) -> ExpertSplit | None:
    """Return the split for a mesh and rules, or None without a mesh.

    Args:
        mesh: A ``jax.sharding.Mesh``, or None.
        rules: As in ``portable_gdn.parallel.axes``.
        count: The number of experts.
        size: The number of columns of an expert's MLP.
    """
    if mesh is None:
        return None
    experts, columns = partition_spec(("experts", "mlp"), (count, size), mesh, rules)
    split = ExpertSplit(mesh, (), (), experts, columns)
    free = lambda name: tuple(n for n in mesh_axes(name, mesh, rules) if n not in split.summed())  # noqa: E731
    return ExpertSplit(mesh, free("batch"), free("sequence"), experts, columns)


class Experts(nnx.Module):
    """The MLPs of all experts: gate_proj and up_proj [X, E, M], down_proj [X, M, E]."""

    def __init__(
        self,
        count: int,
        hidden_size: int,
        size: int,
        numerics: Numerics,
        rngs: nnx.Rngs,
        split: ExpertSplit | None = None,
    ) -> None:
        init = nnx.initializers.lecun_normal(batch_axis=(0,))
        inward, outward = (count, hidden_size, size), (count, size, hidden_size)
        each, rows, columns = ("experts", count), ("embed", hidden_size), ("mlp", size)
        self.gate_proj = named(nnx.Param(init(rngs.params(), inward, numerics.param_dtype)), each, rows, columns)
        self.up_proj = named(nnx.Param(init(rngs.params(), inward, numerics.param_dtype)), each, rows, columns)
        self.down_proj = named(nnx.Param(init(rngs.params(), outward, numerics.param_dtype)), each, columns, rows)
        self.numerics, self.split = numerics, split

    def __call__(self, x: Array, shares: Array, chosen: Array) -> Array:
        """Sum the weighted outputs of each token's experts.

        Args:
            x: [B, T, E].
            shares: [B, T, k] float32, the weight of each of a token's experts.
            chosen: [B, T, k], the experts' numbers.

        Returns:
            [B, T, E], in x's dtype.
        """
        arrays = [a[...].astype(x.dtype) for a in (self.gate_proj, self.up_proj, self.down_proj)]
        run: Any = partial(_mixed, precision=self.numerics.precision)
        split = self.split
        if split is None:
            return run(*arrays, x, shares, chosen).astype(x.dtype)
        P = jax.sharding.PartitionSpec
        tokens = split.placed(x)
        inward, outward = P(split.experts, None, split.columns), P(split.experts, split.columns)

        def part(gate: Array, up: Array, down: Array, x: Array, shares: Array, chosen: Array) -> Array:
            first = 0 if split.experts is None else jax.lax.axis_index(split.experts) * gate.shape[0]
            made = run(gate, up, down, x, shares, chosen - first)
            return jax.lax.psum(made, split.summed()).astype(x.dtype) if split.summed() else made.astype(x.dtype)

        whole: Any = jax.shard_map(
            part, mesh=split.mesh, in_specs=(inward, inward, outward, tokens, tokens, tokens), out_specs=tokens,
            check_vma=False,
        )  # fmt: skip
        return whole(*arrays, x, shares, chosen)


def _mixed(gate: Array, up: Array, down: Array, x: Array, shares: Array, chosen: Array, precision: Any) -> Array:
    """Sum the outputs of some experts, numbered from 0, for tokens [B, T, E] in float32; others add nothing."""
    rows = x.reshape(-1, x.shape[-1])
    k = chosen.shape[-1]
    here = ((chosen >= 0) & (chosen < gate.shape[0])).reshape(-1)
    chosen = chosen.reshape(-1)
    if chosen.size <= gate.shape[0]:
        mine = jnp.where(here, chosen, 0)
        many = partial(jnp.einsum, "ra,rab->rb", precision=precision)
        each = jnp.repeat(rows, k, axis=0)
        made = many(jax.nn.silu(many(each, gate[mine])) * many(each, up[mine]), down[mine])
    else:
        places, sizes = _sorted_places(jnp.where(here, chosen, gate.shape[0]), gate.shape[0])
        product: Any = partial(grouped_product, sizes=sizes, precision=precision)
        each = jnp.zeros((chosen.size, rows.shape[1]), rows.dtype).at[places].set(jnp.repeat(rows, k, axis=0))
        made = product(jax.nn.silu(product(each, gate)) * product(each, up), down)
        made = made[places]  # back in the tokens' order
    made = jnp.where(here[:, None], made, 0).astype(jnp.float32) * shares.reshape(-1, 1)
    return jnp.sum(made.reshape(*x.shape[:2], k, -1), axis=2)


def _sorted_places(groups: Array, count: int) -> tuple[Array, Array]:
    """Where each of the groups' rows stands among all rows sorted by group, in their order within one, [n]; and the
    rows of each of the first ``count`` groups, [count] int32. Group ``count`` is the last.

    Counted and not sorted: the TPU's compiler takes minutes for a sort of so many.
    """
    ones = (groups[:, None] == jnp.arange(count + 1)).astype(jnp.int32)
    before = jnp.cumsum(ones, axis=0) - ones
    sizes = jnp.sum(ones, axis=0)
    starts = jnp.cumsum(sizes) - sizes
    return jnp.sum(ones * (before + starts), axis=1), sizes[:-1]


def grouped_product(rows: Array, weights: Array, sizes: Array, precision: Any) -> Array:
    """Multiply each group of rows by its matrix.

    Args:
        rows: [n, K], sorted by group.
        weights: [X, K, N].
        sizes: [X] int32, the rows of each group. The result is undefined for rows after the last group.
        precision: The precision of the products. The kernel is used with bfloat16, which it does not round.

    Returns:
        [n, N], in the dtype of the rows.
    """
    if rows.dtype != jnp.bfloat16 or weights.shape[1] % 128 or weights.shape[2] % 128:
        return jax.lax.ragged_dot(rows, weights, sizes, precision=precision)
    more = -rows.shape[0] % ROWS
    return _by_kernel(jnp.pad(rows, ((0, more), (0, 0))), weights, sizes)[: rows.shape[0]]


@jax.custom_vjp
def _by_kernel(rows: Array, weights: Array, sizes: Array) -> Array:
    return kernel_or_else(_kernel, jax.lax.ragged_dot, rows, weights, sizes)


def _kernel(rows: Array, weights: Array, sizes: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    return gmm(rows, weights, sizes, rows.dtype, _tiles(*weights.shape[1:]))


def _transposed(rows: Array, weights: Array, sizes: Array) -> Array:
    """Multiply each group of rows [n, N] by the transpose of its matrix [K, N]; the result is [n, K]."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = _tiles(weights.shape[2], weights.shape[1])
    return gmm(rows, weights, sizes, rows.dtype, tiles, transpose_rhs=True)


def _outer(rows: Array, cotangents: Array, sizes: Array) -> Array:
    """Sum the outer products of each group's rows, [X, K, N]; 0 for a group without rows."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = (ROWS, min(rows.shape[1], 512), min(cotangents.shape[1], 512))
    return tgmm(rows.T, cotangents, sizes, rows.dtype, tiles)


def _tiles(inside: int, out: int) -> tuple[int, int, int]:
    return ROWS, min(inside, 1024), min(out, 512)


def _forward(rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _by_kernel(rows, weights, sizes), (rows, weights, sizes)


def _backward(kept: tuple[Array, Array, Array], cotangents: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = kept
    inside = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    cotangents = jnp.where(inside[:, None], cotangents, 0)

    def rows_elsewhere(cotangents: Array, weights: Array, sizes: Array) -> Array:
        return jax.lax.ragged_dot(cotangents, weights.swapaxes(1, 2), sizes)

    def weights_elsewhere(rows: Array, cotangents: Array, sizes: Array) -> Array:
        of_groups = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return jax.lax.ragged_dot_general(rows, cotangents, sizes, of_groups)

    of_rows = kernel_or_else(_transposed, rows_elsewhere, cotangents, weights, sizes)
    of_weights = kernel_or_else(_outer, weights_elsewhere, rows, cotangents, sizes)
    return jnp.where(inside[:, None], of_rows, 0), of_weights, None


_by_kernel.defvjp(_forward, _backward)
