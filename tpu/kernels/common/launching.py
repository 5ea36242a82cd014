"""How every kernel is launched: operands, results and scratch as trees, and the settings of JAX it is traced under."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["Block", "Launch", "launch", "pallas_call", "result_shapes"]

Array = Any
#: A tuple, list, dict or registered dataclass of arrays, blocks or references; None where there is nothing.
Tree = Any


@dataclass(frozen=True)
class Block:
    """An operand or a result of a kernel, and which block of it a grid step gets.

    Attributes:
        array: the operand; of a result its ``jax.ShapeDtypeStruct``, or ``pltpu.HBM`` where it is not to lie in VMEM.
        spec: the block's shape, and its place by the grid's indices.
    """

    array: Any
    spec: pl.BlockSpec


class Launch(NamedTuple):
    """How a kernel is launched.

    name: the kernel's in profiles. grid: groups of heads or parts, which cores may share, and steps, in order.
    vmem_limit: bytes of VMEM, or None for the compiler's own limit. interpret: False, True (generic) or
    ``pltpu.InterpretParams``. aliased: numbers of an operand and the result that takes its memory, in pairs.
    """

    name: str
    grid: tuple[int, int]
    vmem_limit: int | None
    interpret: Any
    aliased: tuple[tuple[int, int], ...] = ()


def launch(
    kernel: Callable[..., None], how: Launch, table: Array | None, operands: Tree, results: Tree, scratch: Tree
) -> Tree:
    """Run a kernel, and return the tree of its results.

    Args:
        kernel: ``kernel(table, operands, results, scratch)``, trees of the same form with references for leaves.
        how: name, grid and limits.
        table: what goes to scalar memory before the grid starts, or None.
        operands, results: trees of ``Block``.
        scratch: a tree of memory spaces, as ``pltpu.VMEM`` makes them.
    """
    leaves, trees = zip(*map(jax.tree.flatten, (operands, results, scratch)), strict=True)
    given, made, room = leaves
    prefetched = [] if table is None else [table]
    ends = [*accumulate(map(len, leaves), initial=len(prefetched))]

    def run(*refs: Any) -> None:
        parts = [refs[a:b] for a, b in pairwise(ends)]
        kernel(refs[0] if prefetched else None, *map(jax.tree.unflatten, trees, parts))

    out = pallas_call(
        run,
        name=how.name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=how.grid,
            in_specs=[block.spec for block in given],
            out_specs=[block.spec for block in made],
            scratch_shapes=room,
        ),
        out_shape=result_shapes([block.array for block in made], given[0].array),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=how.vmem_limit
        ),
        input_output_aliases={operand + len(prefetched): result for operand, result in how.aliased},
        interpret=how.interpret,
    )(*prefetched, *(block.array for block in given))
    return jax.tree.unflatten(trees[1], out)


def pallas_call(*args: Any, **options: Any) -> Callable[..., Any]:
    """``pl.pallas_call``, whose kernel is traced with numbers of 32 bits and the usual promotion of dtypes and ranks.

    With ``jax_enable_x64`` a number in a kernel would be one of 64 bits, which a TPU does not have.
    """
    call = pl.pallas_call(*args, **options)

    def run(*operands: Any) -> Any:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return call(*operands)

    return run


def result_shapes(shapes: Iterable[Any], like: Array) -> list[Any]:
    """Shapes and dtypes of a kernel's results, varying over the axes of a mesh over which ``like`` does.

    Args:
        shapes: ``jax.ShapeDtypeStruct``, or ``pltpu.HBM`` for results that are not to lie in VMEM.
        like: an operand. Inside ``jax.shard_map`` all operands of a call vary over the same axes (``jax_tracing``).
    """
    axes = jax.typeof(like).manual_axis_type

    def described(shape: Any) -> Any:
        if isinstance(shape, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=axes)
        return replace(shape, inner_aval=shape.inner_aval.update(manual_axis_type=axes))

    return [described(shape) for shape in shapes]
