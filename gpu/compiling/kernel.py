"""Reports of Triton kernels, compiled for a GPU that this machine need not have."""

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
    """Compile a Triton kernel for a GPU without having one, and report the resources that it uses.

    Args:
        fn: a function decorated with ``triton.jit``, and perhaps with ``triton.autotune`` and ``triton.heuristics``.
        signature: the type of each parameter that is not a constant, by name, in Triton's notation: "*bf16", "*fp32",
            "i32", "fp32", ...; "i32:16" is an integer divisible by 16, "i32:1" an integer that is 1, and "i32" any
            integer. Addresses of arrays are assumed to be divisible by 16, like those of torch's tensors, and arrays on
            AMD to be smaller than 2 GiB.
        constants: the values of ``tl.constexpr`` parameters that neither a configuration nor a heuristic sets. Other
            parameters that are not named have their default, or None. A heuristic gets a placeholder for each array.
        sizes: the values of numbers that a launch would be given, such as ``{"M": 4096, "stride": 1}``. They determine
            what the launch would specialise (divisibility by 16, being 1), and the types of numbers that the signature
            does not name.
        arch: one of ``portable_gdn.gpu.TARGETS``: "sm_80", "sm_90", "sm_100", "gfx942".
        all_configs: whether to compile all configurations of ``triton.autotune``, not only the first.
        options: num_warps, num_stages, ...; they take precedence over those of the configurations.

    Returns:
        A report of the kernel with one entry per configuration; if one does not compile, its ``failed`` says why.

    Raises:
        GdnError: an argument is wrong or missing, Triton is not installed, or this process interprets kernels.
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
    """Return the tile sizes, warps and stages of one of ``triton.autotune``'s configurations."""
    given = config.all_kwargs()
    return {name: value for name, value in given.items() if value is not None and (name, value) != ("num_ctas", 1)}


def _unwrapped(fn: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the kernel itself, its configurations and its heuristics."""
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
    """Check that each name is that of a parameter, and is given only once."""
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
    """Return the values by name as a heuristic sees them, and the names of parameters that are None as none was given.

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
    if hasattr(knobs.language, "default_fp_fusion"):  # Triton's own default, set here to avoid its warning
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
    except Exception as error:  # any error of the compiler is part of the report
        why = failure(error)
        if unnamed and "None" in str(error):
            names = " and ".join(map(repr, unnamed))
            raise GdnError(
                f"signature does not name {names}; it must give a type to each parameter of {kernel.__name__} that is "
                f"no constant. (Unnamed, it is None, with which the kernel does not compile: {why})"
            ) from error
        return report._replace(failed=why)


def failure(error: Exception) -> str:
    """Return the message of a compiler's error: its last line that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
