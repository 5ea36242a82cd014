"""Reports of the kernels that calls of the rule launch on a GPU.

Calls are built from their dimensions. Every kernel of FLA that they would launch is compiled, and none is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import dispatch
from ..spec.errors import GdnError
from ..spec.problem import Meta, Options
from ..spec.rules import make_signature
from .shapes import Shape, check_shape, operand_shapes

__all__ = ["gpu_reports"]


def gpu_reports(
    operations: Sequence[str],
    variants: Sequence[str],
    shape: Shape,
    archs: Sequence[str],
    *,
    precision: str | None = None,
    l2norm: bool = True,
    all_configs: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Any]:
    """Compile the kernels of calls, and return a report for each architecture.

    Args:
        operations: some of ``shapes.OPERATIONS``. "backward" launches the forward pass first, and its kernels are
            shown, too.
        variants: some of the names in ``shapes.VARIANTS``.
        shape: the dimensions and dtype of the calls.
        archs: the GPU architectures.
        precision: the precision of the calls, or None for the default.
        l2norm: whether the calls normalise q and k, as models do.
        all_configs: whether to compile every configuration that autotuning would try.
        progress: called with the name of each kernel that is compiled.

    Returns:
        For each architecture a ``CompileReport`` of ``portable_gdn.gpu``, or the GdnError that prevented it.

    Raises:
        GdnError: an argument is wrong, or a package is missing.
    """
    from ..gpu.compiling.calls import Call, compile_calls
    from ..gpu.compiling.targets import target_named
    from ..gpu.versions import missing

    for arch in archs:
        target_named(arch)
    calls = []
    for variant in variants:
        for op in operations:
            check_shape(op, variant, shape)
            if op == "forward" and "backward" in operations:
                continue  # its kernels are reported with "backward"
            options = Options(output_final_state=True, qk_l2norm=l2norm, precision=precision, step=op == "step")
            name = f"{variant} step" if op == "step" else variant
            operands = operand_shapes(op, variant, shape)
            meta = {name: Meta(dims, dtype, "cuda") for name, (dims, dtype) in operands.items()}
            why = dispatch.get("fla").refuses(make_signature("torch", "cuda", meta, options))
            if why is not None:
                raise GdnError(f"no kernel of FLA serves {name} like that: {why}.")
            calls.append(Call(name, operands, options, op == "backward"))
    why = missing()
    if why is not None:
        raise GdnError(why)
    found: list[Any] = []
    for arch in archs:
        try:
            found.append(compile_calls(calls, arch, all_configs=all_configs, progress=progress))
        except GdnError as error:
            found.append(error)
    return found
