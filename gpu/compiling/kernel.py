"""The report of any Triton kernel, compiled here for a GPU that need not be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ...spec.errors import GdnError, bad
from .. import interpreter
from ..versions import missing, versions
from .arguments import Argument, arguments_of
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
    sizes: Mapping[str, Any] | None = None,
    arch: str = "sm_90",
    all_configs: bool = False,
    **options: int,
) -> CompileReport:
    """Compile a Triton kernel for a GPU, without one, and say what it takes.

    Args:
        fn: what ``triton.jit`` made, also under ``triton.autotune`` and ``triton.heuristics``.
        signature: the type of each parameter that is no constant, by name, in Triton's notation: "*bf16", "*fp32",
            "i32", "fp32", ...; "i32:16" is an integer that 16 divides, "i32:1" one that is 1. A bare "i32" is any
            integer. Arrays are taken to be divisible by 16, as torch's tensors are, and on AMD of less than 2 GiB.
        constants: values of the ``tl.constexpr`` parameters that neither a configuration nor a heuristic gives. Another
            parameter that is named nowhere is its default, or None. A heuristic sees a placeholder for each array.
        sizes: values of numbers that a launch would be given, ``{"M": 4096, "stride": 1}``: what a launch finds out
            about them (that 16 divides them, that they are 1) follows, and their types, if signature has none.
        arch: one of ``portable_gdn.gpu.TARGETS``: "sm_80", "sm_90", "sm_100", "gfx942".
        all_configs: every configuration of ``triton.autotune`` and not the first alone.
        options: num_warps, num_stages, ..., over those of the configurations.

    Returns:
        A report of the kernel, an entry a configuration; one that does not compile says why in ``failed``.

    Raises:
        GdnError: an argument is wrong or missing, Triton is not installed, or this process interprets its kernels.
    """
    target = target_named(arch)
    why = missing(("triton",))
    if why is not None:
        raise GdnError(why)
    if interpreter.chosen():
        raise GdnError(f"{interpreter.VARIABLE} is on, and an interpreted kernel is not compiled; start a new process.")
    kernel, configs, heuristics = _unwrapped(fn)
    constants, sizes = dict(constants or {}), dict(sizes or {})
    _check_names(kernel, {"signature": signature, "constants": constants, "sizes": sizes})
    for name in options:
        if name not in OPTIONS:
            raise bad(name, "given", f"be one of {', '.join(OPTIONS)}")
    arguments = arguments_of(kernel, signature, sizes, target)
    reports = []
    for config in configs if all_configs else configs[:1]:
        chosen = {**config_of(config), **options}
        reports.append(_compiled(kernel, arguments, constants, heuristics, chosen, target))
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


def _check_names(kernel: Any, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Each name is a parameter's, and says one thing of it."""
    for argument, names in given.items():
        for name in names:
            if name not in kernel.arg_names:
                near = difflib.get_close_matches(name, kernel.arg_names, 1)
                raise GdnError(
                    f"{argument} is given for {name!r}; it must name parameters of {kernel.__name__}"
                    + (f"; did you mean {near[0]!r}?" if near else ".")
                )
    for name in given["constants"]:
        if name in given["signature"] or name in given["sizes"]:
            other = "signature" if name in given["signature"] else "sizes"
            raise bad(name, f"given in constants and in {other}", "be given in one of them: a constant has no type")


def _given(
    kernel: Any, arguments: Mapping[str, Argument], constants: Mapping[str, Any], heuristics: Any, chosen: Any
) -> tuple[dict[str, Any], list[str]]:
    """Values by name, of numbers and arrays as a heuristic sees them; and those that are None since nobody named them.

    Raises:
        GdnError: a ``tl.constexpr`` has no value.
    """
    values: dict[str, Any] = {}
    unnamed = []
    for param in kernel.params:
        name = param.name
        if name in arguments:
            values[name] = arguments[name].seen
        elif name in constants or name in chosen:
            values[name] = chosen[name] if name in chosen else constants[name]
        elif param.has_default:
            values[name] = param.default
        elif param.is_constexpr and name not in heuristics:
            raise GdnError(
                f"constants does not name {name!r}; it must give a value to every tl.constexpr of {kernel.__name__} "
                "that no configuration or heuristic gives."
            )
        else:
            values[name] = None
            if name not in heuristics:
                unnamed.append(name)
    return values, unnamed


def _compiled(
    kernel: Any,
    arguments: dict[str, Argument],
    constants: dict[str, Any],
    heuristics: dict[str, Any],
    chosen: dict[str, Any],
    target: Target,
) -> KernelReport:
    import triton
    from triton import knobs
    from triton.compiler import ASTSource

    options = {name: value for name, value in chosen.items() if name not in kernel.arg_names and value is not None}
    given, unnamed = _given(kernel, arguments, constants, heuristics, chosen)
    taken = {name: argument.said for name, argument in arguments.items()}
    taken |= dict.fromkeys(unnamed, "None, since it is named nowhere")
    report = KernelReport(kernel.__name__, chosen, limit=target.shared, taken=taken)
    if hasattr(knobs.language, "default_fp_fusion"):  # what would be chosen anyway, with a warning to who did not ask
        options.setdefault("enable_fp_fusion", knobs.language.default_fp_fusion)
    try:
        for name, value in heuristics.items():
            given[name] = value(given)
        types = {name: arguments[name].type if name in arguments else "constexpr" for name in kernel.arg_names}
        given |= {name: argument.value for name, argument in arguments.items() if argument.type == "constexpr"}
        values = {name: given[name] for name, kind in types.items() if kind == "constexpr"}
        places = {name: i for i, name in enumerate(kernel.arg_names)}
        known = {(places[name],): argument.attributes for name, argument in arguments.items() if argument.attributes}
        source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=known)
        with assembler_log() as log:
            compiled = triton.compile(source, target=target.triton(), options=options)
        return report._replace(**usage(compiled, log.text))
    except Exception as error:  # whatever the compiler finds wrong with it is the finding
        why = failure(error)
        if unnamed and "None" in str(error):
            names = " and ".join(map(repr, unnamed))
            raise GdnError(
                f"signature does not name {names}; it must give a type to each parameter of {kernel.__name__} that is "
                f"no constant. (Unnamed, it is None, with which the kernel does not compile: {why})"
            ) from error
        return report._replace(failed=why)


def failure(error: Exception) -> str:
    """The sentence of a compiler's error: its last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
