"""What calls of the rule launch on a GPU: built from their dimensions, every kernel of FLA compiled, none launched."""

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
    """Reports (``portable_gdn.gpu``'s CompileReport), an architecture each, or the GdnError that says why not.

    Args:
        operations: of ``shapes.OPERATIONS``; "backward" launches the forward pass first, whose kernels are shown too.
        l2norm: whether q and k are normalised, as models do.
        all_configs: every configuration that autotuning would try.
        progress: called with the name of each kernel that is compiled.

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
                continue  # it comes with the other
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
