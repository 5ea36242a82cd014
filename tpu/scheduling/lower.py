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
    """A Pallas call: its name, grid, and each block with the array that it is cut from, as text."""

    name: str
    grid: tuple[int, ...]
    blocks: tuple[str, ...]


class Lowered(NamedTuple):
    """A function lowered for a TPU.

    module: serialised by ``jax.export``; text: the same without places in source files, for a cache's key.
    calls: its Pallas calls; values: those integer arguments whose values were given, by number.
    """

    module: bytes
    text: str
    calls: tuple[Call, ...]
    values: dict[int, np.ndarray]


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
    before = jax.config.jax_export_ignore_forward_compatibility
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    try:
        with on(chip):
            calls = tuple(_calls(jax.make_jaxpr(flat)(*shapes).jaxpr))
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
    return Lowered(module, _without_places(exported.mlir_module()), calls, _values(leaves))


def _without_places(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]
    return re.sub(r' loc\((?:#\w+|"[^"]*")\)', "", "\n".join(lines))


def _shape(a: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(np.shape(a), a.dtype if hasattr(a, "dtype") else np.asarray(a).dtype)


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
    grid = tuple(int(n) for n in mapping.grid if isinstance(n, int | np.integer))
    blocks = []
    for block in mapping.block_mappings:
        shape = "x".join(str(getattr(n, "block_size", n)) for n in block.block_shape)
        blocks.append(f"{block.origin} {shape} of {block.array_aval.str_short()}")
    return Call(str(params.get("name") or params.get("name_and_src_info")), grid, tuple(blocks))
