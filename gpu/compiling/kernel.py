"""The report of any Triton kernel, compiled here for a GPU that need not be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...spec.errors import GdnError, bad
from .. import interpreter
from ..versions import missing, versions
from .report import CompileReport, KernelReport
from .targets import Target, target_named
from .usage import assembler_log, usage

__all__ = ["compile_report", "config_of"]

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def compile_report(
    fn: Any,
    signature: Mapping[str, str],
    *,
    constants: Mapping[str, Any] | None = None,
    arch: str = "sm_90",
    all_configs: bool = False,
    **options: int,
) -> CompileReport:
    """Compile a Triton kernel for a GPU, without one, and say what it takes.

    Args:
        fn: what ``triton.jit`` made, also under ``triton.autotune`` and ``triton.heuristics``.
        signature: the type of each parameter that is no constant, by name: "*bf16", "*fp32", "i32", "fp32", ....
            Pointers are taken to be divisible by 16, as those of torch's tensors are.
        constants: values of the ``tl.constexpr`` parameters that neither a configuration nor a heuristic gives; any
            parameter named nowhere is None. A heuristic sees a placeholder for each pointer.
        arch: one of ``portable_gdn.gpu.TARGETS``: "sm_80", "sm_90", "sm_100", "gfx942".
        all_configs: every configuration of ``triton.autotune`` and not the first alone.
        options: num_warps, num_stages, ..., over those of the configurations.

    Returns:
        A report of the kernel, an entry a configuration; one that does not compile says why in ``failed``.

    Raises:
        GdnError: an argument is wrong, Triton is not installed, or this process interprets its kernels.
    """
    target = target_named(arch)
    why = missing(("triton",))
    if why is not None:
        raise GdnError(why)
    if interpreter.chosen():
        raise GdnError(f"{interpreter.VARIABLE} is on, and an interpreted kernel is not compiled; start a new process.")
    kernel, configs, heuristics = _unwrapped(fn)
    constants = dict(constants or {})
    unknown = [name for name in (*signature, *constants) if name not in kernel.arg_names]
    if unknown:
        raise bad("signature", f"given for {unknown[0]!r}", f"name parameters of {kernel.__name__}")
    for name in options:
        if name not in OPTIONS:
            raise bad(name, "given", f"be one of {', '.join(OPTIONS)}")
    reports = []
    for config in configs if all_configs else configs[:1]:
        chosen = {**config_of(config), **options}
        reports.append(_compiled(kernel, dict(signature), constants, heuristics, chosen, target))
    return CompileReport(arch, tuple(reports), versions(("triton",)))


def config_of(config: Any) -> dict[str, Any]:
    """Tile sizes, warps and stages of one of ``triton.autotune``'s configurations."""
    given = config.all_kwargs()
    return {name: value for name, value in given.items() if value is not None and (name, value) != ("num_ctas", 1)}


def _unwrapped(fn: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The kernel itself, its configurations, its heuristics."""
    from triton import Config, JITFunction

    configs: list[Any] = []
    heuristics: dict[str, Any] = {}
    while not isinstance(fn, JITFunction):
        if not hasattr(fn, "fn"):
            raise bad("fn", f"a {type(fn).__name__}", "be a function made by triton.jit")
        configs = getattr(fn, "configs", configs)
        heuristics = {**getattr(fn, "values", {}), **heuristics}
        fn = fn.fn
    return fn, configs or [Config({})], heuristics


def _compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    heuristics: dict[str, Any],
    chosen: dict[str, Any],
    target: Target,
) -> KernelReport:
    import triton
    from triton.compiler import ASTSource

    options = {name: value for name, value in chosen.items() if name not in kernel.arg_names and value is not None}
    given = dict.fromkeys(kernel.arg_names)
    given |= {name: kernel.signature.parameters[name].default for name in kernel.arg_names}
    given = {name: None if value is kernel.signature.empty else value for name, value in given.items()}
    given |= {name: object() for name in signature} | constants
    given |= {name: value for name, value in chosen.items() if name in kernel.arg_names}
    report = KernelReport(kernel.__name__, chosen, limit=target.shared)
    try:
        for name, value in heuristics.items():
            given[name] = value(given)
        types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
        values = {name: given[name] for name in kernel.arg_names if name not in signature}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name].startswith("*")
        }
        source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
        with assembler_log() as log:
            compiled = triton.compile(source, target=target.triton(), options=options)
        return report._replace(**usage(compiled, log.text))
    except Exception as error:  # whatever the compiler finds wrong with it is the finding
        return report._replace(failed=failure(error))


def failure(error: Exception) -> str:
    """The sentence of a compiler's error: its last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
