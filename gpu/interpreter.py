"""Run FLA's Triton kernels on CPU tensors through Triton's interpreter.

TRITON_INTERPRET=1 chooses the interpreter for a whole process, and must be set before triton is imported. The
interpreter then needs five repairs to run FLA. They change private names of Triton, which may differ in new versions; a
self-test detects that.

1. Autotuning times kernels on a device. Here it takes the first configuration and times nothing.
2. The variable of a ``for ... in range`` loop is a tensor in a compiled kernel, where FLA calls its ``.to``, but a
   Python int in the interpreter. Here it is made a tensor.
3. The interpreter stores bfloat16 as bits and computes with these bits. Here operands are widened to float32, and
   results rounded.
4. FLA keeps its own reference to ``tl.gather``, which the interpreter therefore does not replace. Here it is replaced.
5. The interpreter's list of precisions for products lacks "bf16x3" and "bf16x6". Here they are added; it computes all
   products in float32.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from functools import cache
from typing import Any

import numpy as np

from ..spec.errors import GdnError
from ..spec.undisturbed import undisturbed
from .launching import without_other_libraries

__all__ = ["VARIABLE", "chosen", "possible", "repair_imported", "start"]

VARIABLE = "TRITON_INTERPRET"
WORKS = "triton 3.7 to 3.9"
OLDEST = (3, 7)  # older versions fail in the chunk kernels; 3.7.1, 3.8.0 and 3.9.0 are known to work


def chosen() -> bool:
    """Return whether this process interprets Triton kernels, or would if triton were imported now."""
    language = getattr(sys.modules.get("triton"), "language", None)
    kernel = getattr(language, "softmax", None)  # one of Triton's own kernels, decorated at import
    if kernel is not None:
        return type(kernel).__name__ == "InterpretedFunction"
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def possible() -> str | None:
    """Return a sentence that says why this process can no longer interpret kernels, or None."""
    if sys.modules.get("triton") is not None and not chosen():
        return f"triton was imported without its interpreter; start a fresh process, or one with {VARIABLE}=1"
    return None


@cache
def start() -> None:
    """Choose the interpreter, repair it and test it, once per process.

    Raises:
        GdnError: this process, or this version of Triton, cannot interpret the kernels.
    """
    why = possible()
    if why is not None:
        raise GdnError(f"backend 'fla-interpret' cannot run here: {why}.")
    os.environ[VARIABLE] = "1"
    without_other_libraries()
    os.environ["FLA_USE_FAST_OPS"] = "0"  # they use functions that the interpreter lacks
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        raise GdnError(f"triton is {triton.__version__}; it must be {OLDEST[0]}.{OLDEST[1]} or later to interpret FLA.")
    try:
        _repair()
        _test()
    except GdnError:
        raise
    except Exception as error:
        raise GdnError(
            f"triton {triton.__version__} cannot be made to interpret FLA's kernels: {type(error).__name__}: {error}; "
            f"{WORKS} can."
        ) from error


def _repair() -> None:
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    def first(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        return [0.0 if config is self.configs[0] else 1.0] * 3

    Autotuner._bench = first
    interpreter.FunctionRewriter.ast_transformer = _loops(interpreter)
    _bfloat16(interpreter)
    precisions = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(allowed_dot_input_precisions=precisions)


def _loops(interpreter: Any) -> Any:
    """Return a rewriter that makes the variable of every range loop a tensor."""

    class Loops(interpreter.ASTTransformer):  # type: ignore[misc]
        def visit_For(self, node: ast.For) -> ast.AST:
            node = self.generic_visit(node)
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
            if name == "range" and isinstance(node.target, ast.Name):
                text = f"{node.target.id} = interpreter_semantic.to_tensor({node.target.id}, False)"
                node.body.insert(0, ast.copy_location(ast.parse(text).body[0], node.body[0]))
            return node

    return Loops()


def _bfloat16(interpreter: Any) -> None:
    """Make the interpreter compute bfloat16 in float32, rounded to nearest even, instead of computing with its bits."""
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, convert = builder.cast_impl, builder.create_fp_to_fp
    binary, unary, dot = builder.binary_op, builder.unary_op, builder.create_dot
    reduce_or_scan = interpreter.ReduceScanOpInterface.apply

    def is_bits(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16

    def widen(x: Any) -> Any:
        if not is_bits(x):
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def narrow(data: np.ndarray) -> Any:
        data = np.ascontiguousarray(data, np.float32)
        bits = data.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return handle(np.where(np.isnan(data), np.uint16(0x7FC0), rounded), tl.bfloat16)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        source = widen(source)
        if target.scalar == tl.bfloat16 and source.data.dtype != np.uint16:
            return narrow(source.data)
        if source.dtype.scalar == target.scalar:
            return source
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if is_bits(source) or target.scalar == tl.bfloat16:
            return cast_impl(self, source, target)
        return convert(self, source, target, mode)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not (is_bits(left) or is_bits(right)):
            return binary(self, left, right, op)
        result = op(widen(left).data, widen(right).data)
        return narrow(result) if result.dtype == np.float32 else handle(result, tl.bfloat16)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return narrow(op(widen(x).data)) if is_bits(x) else unary(self, x, op)

    def create_dot(self: Any, a: Any, b: Any, into: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), into, *rest)

    def apply(self: Any, given: Any) -> Any:
        inputs = given if isinstance(given, tuple) else (given,)
        bits = [is_bits(x.handle) for x in inputs]
        if not any(bits):
            return reduce_or_scan(self, given)
        wide = tuple(
            self.to_tensor(widen(x.handle).data, tl.float32) if b else x for x, b in zip(inputs, bits, strict=True)
        )
        results = reduce_or_scan(self, wide)
        results = results if isinstance(results, tuple) else (results,)
        results = tuple(
            interpreter.interpreter_semantic.cast(x, tl.bfloat16) if b and x.dtype == tl.float32 else x
            for x, b in zip(results, bits, strict=True)
        )
        return results if isinstance(given, tuple) else results[0]

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.binary_op, builder.unary_op, builder.create_dot = binary_op, unary_op, create_dot
    interpreter.ReduceScanOpInterface.apply = apply


@cache
def repair_imported(module: str) -> None:
    """Repair FLA's own references, once for each of its imported modules; do nothing if kernels are compiled."""
    if chosen():
        _repair_gather()


def _repair_gather() -> None:
    """Give FLA's modules a ``gather`` that the interpreter can replace."""
    import triton.language as tl

    builtin = tl.gather
    from .interpreted_gather import gather

    for module in list(sys.modules.values()):
        inside = isinstance(module, types.ModuleType) and module.__name__.startswith("fla.")
        if inside and module.__dict__.get("gather") is builtin:
            module.gather = gather  # type: ignore[attr-defined]


def _test() -> None:
    """Test a bfloat16 product in a loop whose result is known."""
    import torch
    import triton

    from .interpreted_gather import probe

    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (2, 16, 16)).astype(np.float32)
    with undisturbed(products=True):
        bits = (torch.from_numpy((x.view(np.uint32) >> 16).astype(np.int16)).view(torch.bfloat16) for x in (a, b))
        out = torch.from_numpy(np.zeros((16, 16), np.float32))
        probe[(1,)](*bits, out)
        found = out.numpy()
    # Three products, each plus its number. The reference is numpy, which no setting of torch makes round.
    if not np.array_equal(found, 3 * (a @ b) + 3):
        raise GdnError(
            f"triton {triton.__version__} cannot be made to interpret FLA's kernels: "
            f"a bfloat16 product in a loop, whose result is known, comes out wrong; {WORKS} can."
        )
