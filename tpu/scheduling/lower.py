"""The caller's half: trace and lower a function for a chip, where its closures are, and note its Pallas calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...spec.errors import GdnError
from ..chips import Chip
from .compile import on

__all__ = ["Call", "Lowered", "lower"]

#: Integers of one argument that are handed on; more are a table that no kernel could keep in scalar memory.
MOST_VALUES = 1 << 18


class Call(NamedTuple):
    """A Pallas call: its name, its grid if it is known, and each block with the array that it is cut from, as text."""

    name: str
    grid: tuple[int, ...] | None
    blocks: tuple[str, ...]


class Lowered(NamedTuple):
    """A function lowered for a TPU.

    module: serialised by ``jax.export``; text: the same without places in source files, for a cache's key.
    calls: its Pallas calls; values: those integer arguments whose values were given, by number; donated: numbers of
    the arguments that its caller gives away. mesh: names and sizes of the axes of the mesh that its arguments lie on;
    () for one device.
    """

    module: bytes
    text: str
    calls: tuple[Call, ...]
    values: dict[int, np.ndarray]
    donated: tuple[int, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()


def lower(chip: Chip, function: Callable[..., Any], args: tuple[Any, ...]) -> Lowered:
    """Trace ``function`` at the shapes of ``args`` and lower it for a chip.

    Raises:
        GdnError: it cannot be traced or lowered for a TPU; the cause is the exception's.
    """
    import jax
    from jax import export

    leaves, tree = jax.tree.flatten(args)
    shapes = [_shape(a) for a in leaves]

    def flat(*leaves: Any) -> list[Any]:  # trees of the caller's own classes need not be known elsewhere
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    calls: tuple[Call, ...] = ()
    # Nothing is stored for other versions to load: the newest form of a kernel is the one that would run.
    before = jax.config.jax_export_ignore_forward_compatibility  # type: ignore[attr-defined]
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    try:
        with on(chip):
            traced = jax.make_jaxpr(flat)(*shapes)
            named = _named(traced)
            calls = tuple(_calls(named.jaxpr))
            donated = _donated(function, traced.jaxpr)
            if named is not traced:
                flat = _of_jaxpr(named)
            exported = export.export(jax.jit(flat, keep_unused=True), platforms=["tpu"])(*shapes)
    except GdnError:
        raise
    except Exception as error:
        what = f"kernel {calls[0].name}" if len(calls) == 1 else "the function"
        raise GdnError(f"{what} cannot be lowered for {chip.name}: {_first_lines(error)}") from error
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", before)
    try:
        module = bytes(exported.serialize())
    except ImportError:
        raise GdnError(
            "flatbuffers is not installed, which jax needs to hand a program to another process; "
            "`pip install 'portable-gdn[tpu]'` brings it."
        ) from None
    text = _without_places(exported.mlir_module())
    return Lowered(module, text, calls, _values(leaves), donated, _mesh(shapes))


def _of_jaxpr(traced: Any) -> Callable[..., list[Any]]:
    """A traced function as one that can be traced."""
    from jax.extend.core import jaxpr_as_fun

    run = jaxpr_as_fun(traced)

    def flat(*leaves: Any) -> list[Any]:
        return run(*leaves)

    return flat


def _named(traced: Any, grids: dict[str, Any] | None = None) -> Any:
    """A traced program, in which Pallas calls that were given no name have that of their kernel's function.

    The compiler would call them all after the function around them. Where each has a name, it is the program itself.
    ``grids``: the first of each name; a kernel with another one has that in its name too.
    """
    grids = {} if grids is None else grids
    jaxpr = traced.jaxpr if hasattr(traced, "jaxpr") else traced
    equations = [_named_equation(equation, grids) for equation in jaxpr.eqns]
    if all(a is b for a, b in zip(equations, jaxpr.eqns, strict=True)):
        return traced
    jaxpr = jaxpr.replace(eqns=equations)
    return traced.replace(jaxpr=jaxpr) if hasattr(traced, "jaxpr") else jaxpr


def _named_equation(equation: Any, grids: dict[str, Any]) -> Any:
    params = equation.params
    if equation.primitive.name == "pallas_call":
        if params.get("name"):
            return equation
        name, grid = _name(params), tuple(map(str, params["grid_mapping"].grid))
        if grids.setdefault(name, grid) != grid:
            name = "_".join([name, "x".join(grid)])
        source = equation.source_info
        return equation.replace(
            params={**params, "name": name}, source_info=source.replace(name_stack=source.name_stack.extend(name))
        )
    changed = {}
    for name, value in params.items():
        several = isinstance(value, tuple | list)
        inner = [_named(a, grids) if hasattr(a, "eqns") else a for a in (value if several else [value])]
        if any(a is not b for a, b in zip(inner, value if several else [value], strict=True)):
            changed[name] = type(value)(inner) if several else inner[0]
    return equation.replace(params={**params, **changed}) if changed else equation


def _name(params: dict[str, Any]) -> str:
    """What a Pallas call was named, or its kernel's function."""
    made = getattr(params.get("jaxpr"), "debug_info", None)
    words = str(params.get("name") or getattr(made, "func_src_info", None) or "kernel").split()
    return re.sub(r"\W", "_", words[0]).strip("_") or "kernel"


def _donated(function: Any, jaxpr: Any) -> tuple[int, ...]:
    """Numbers of the arguments that ``function`` gives away; only what is jitted itself can."""
    if not (hasattr(function, "trace") and hasattr(function, "lower")):
        return ()
    numbers = {id(variable): number for number, variable in enumerate(jaxpr.invars)}
    found = set()
    for equation in jaxpr.eqns:
        flags = equation.params.get("donated_invars", ())
        found |= {
            numbers[id(variable)]
            for variable, donated in zip(equation.invars, flags, strict=False)
            if donated and id(variable) in numbers
        }
    return tuple(sorted(found))


def _without_places(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]
    return re.sub(r' loc\((?:#\w+|"[^"]*")\)', "", "\n".join(lines))


def _shape(a: Any) -> Any:
    import jax

    dtype = a.dtype if hasattr(a, "dtype") else np.asarray(a).dtype
    where = getattr(a, "sharding", None) if isinstance(a, jax.ShapeDtypeStruct) else None
    on_mesh = isinstance(where, jax.sharding.NamedSharding) and where.mesh.size > 1
    return jax.ShapeDtypeStruct(np.shape(a), dtype, sharding=where if on_mesh else None)


def _mesh(shapes: list[Any]) -> tuple[tuple[str, int], ...]:
    """The mesh that arguments lie on.

    Raises:
        GdnError: there are several.
    """
    found = {tuple(a.sharding.mesh.shape.items()) for a in shapes if a.sharding is not None}
    if len(found) > 1:
        raise GdnError("the arguments lie on several meshes; they must lie on one, or on none.")
    return next(iter(found), ())


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + re.sub(r"\.? Please file .*", "", " ".join(lines[:3])).rstrip(".") + "."


def _values(leaves: list[Any]) -> dict[int, np.ndarray]:
    import jax

    found = {}
    for number, a in enumerate(leaves):
        if isinstance(a, jax.ShapeDtypeStruct):
            continue
        value = np.asarray(a)
        if value.size <= MOST_VALUES and np.issubdtype(value.dtype, np.integer):
            found[number] = value
    return found


def _calls(jaxpr: Any) -> Iterator[Call]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield _call(equation.params)
            continue
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else [parameter]:
                if hasattr(inner, "jaxpr"):
                    yield from _calls(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from _calls(inner)


def _call(params: dict[str, Any]) -> Call:
    mapping = params["grid_mapping"]
    known = all(isinstance(n, int | np.integer) for n in mapping.grid)
    grid = tuple(int(n) for n in mapping.grid) if known else None
    blocks = []
    for block in mapping.block_mappings:
        shape = "x".join(str(getattr(n, "block_size", n)) for n in block.block_shape)
        blocks.append(f"{block.origin} {shape} of {block.array_aval.str_short()}")
    return Call(_name(params), grid, tuple(blocks))
