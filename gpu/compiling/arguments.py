"""What a kernel is compiled for: the type of each parameter, and what a launch with such values would specialise.

A launch looks at its integers: one that 16 divides is known to the compiler as such, one that is 1 is a constant. Both
change the code that comes out: without the first there are no asynchronous copies, and so no pipeline in shared memory.
"""

from __future__ import annotations

import difflib
import numbers
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...spec.errors import GdnError, bad
from .targets import Target

__all__ = ["Argument", "arguments_of"]

_ALIASES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int": "i32", "int32": "i32", "int64": "i64", "uint8": "u8",
    "uint16": "u16", "uint32": "u32", "uint64": "u64", "half": "fp16", "float16": "fp16", "bfloat16": "bf16",
    "float": "fp32", "float32": "fp32", "double": "fp64", "float64": "fp64",
}  # fmt: skip
_INTEGERS = tuple(f"{kind}{bits}" for kind in "iu" for bits in (8, 16, 32, 64))
_FLOATS = ("fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16", "fp8e4b15")
_TYPES = ("i1", "u1", *_INTEGERS, *_FLOATS)
_FORM = re.compile(r"(\*k?)?\s*(\w+)\s*(?::\s*(\w+))?")
_RANGES = {
    name: (-(1 << int(name[1:]) - 1), (1 << int(name[1:]) - 1) - 1) if name[0] == "i" else (0, (1 << int(name[1:])) - 1)
    for name in _INTEGERS
}
DIVISIBLE = ["tt.divisibility", 16]
NEAR = ["tt.pointer_range", 32]  # of AMD's compiler: offsets of 32 bits reach all of the array


class Argument(NamedTuple):
    """One parameter as it is compiled.

    type: Triton's; "constexpr" where it is a constant, of this value. seen: by a heuristic. attributes: Triton's, of
    what is known of its value. said: all that, for a reader.
    """

    type: str
    value: Any
    seen: Any
    attributes: list[list[Any]]
    said: str


class _Pointer:
    """What a heuristic sees where an array would be given."""


def arguments_of(
    kernel: Any, signature: Mapping[str, str], sizes: Mapping[str, Any], target: Target
) -> dict[str, Argument]:
    """The parameters that a signature or a size names, by name.

    Raises:
        GdnError: a type is none of Triton's, or a size does not go with it.
    """
    params = {p.name: p for p in kernel.params}
    found = {}
    for name, given in signature.items():
        kind, divisible, one = _parsed(name, given)
        if name in sizes:
            found[name] = _sized(params[name], sizes[name], kind, divisible, one)
        elif kind.startswith("*"):
            found[name] = _pointer(kind, target)
        else:
            found[name] = _typed(params[name], kind, divisible, one)
    for name, value in sizes.items():
        if name not in found:
            found[name] = _sized(params[name], value, None, False, False)
    return found


def _parsed(name: str, given: Any) -> tuple[str, bool, bool]:
    """Type, whether 16 divides it, and whether it is 1, from Triton's notation."""
    where = f"the type of {name!r} in signature"
    if isinstance(given, str) and given.startswith(("tensordesc", "nvTmaDesc")):
        return given, False, False
    form = _FORM.fullmatch(given.strip()) if isinstance(given, str) else None
    kind = _ALIASES.get(form[2], form[2]) if form else ""
    if form is None or kind not in _TYPES:
        raise GdnError(
            f"{where} is {given!r}; it must be one of Triton's, such as '*bf16' (an array), 'fp32', 'i32' or 'i32:16' "
            f"(an integer that 16 divides){_nearest(given)}"
        )
    hint, pointer = form[3], form[1] or ""
    if hint not in (None, "16", *(() if pointer else ("1",))):
        raise bad(where, f"{given!r}", f"end in {':16' if pointer else ':16 or :1'}, or have no such ending")
    if hint and not pointer and kind not in _INTEGERS:
        raise bad(where, f"{given!r}", f"have no {hint!r} behind it: a launch looks at integers and arrays alone")
    return pointer + kind, hint == "16", hint == "1"


def _nearest(given: Any) -> str:
    """ "; did you mean ...?" where something like it exists, and a full stop where nothing does."""
    if not isinstance(given, str):
        return "."
    text, _, hint = given.strip().partition(":")
    star, word = "*" * ("*" in text), text.replace("*", "").strip().lower().removeprefix("torch.").removeprefix("tl.")
    near = difflib.get_close_matches(word, [*_TYPES, *_ALIASES], 1, 0.5)
    if not near:
        return "."
    hint = f":{hint}" if hint in ("16", "1") else ""
    return f"; did you mean '{star}{_ALIASES.get(near[0], near[0])}{hint}'?"


def _pointer(kind: str, target: Target) -> Argument:
    """An array as torch makes it: its address is divisible by 16, and on AMD one below 2 GiB is known to be that."""
    near = target.backend == "hip"
    said = f"{kind} divisible by 16" + (", of less than 2 GiB" if near else "")
    return Argument(kind, None, _Pointer(), [DIVISIBLE, NEAR] if near else [DIVISIBLE], said)


def _typed(param: Any, kind: str, divisible: bool, one: bool) -> Argument:
    """A number of which nothing is known but what its ending says."""
    if divisible and (param.do_not_specialize or param.do_not_specialize_on_alignment):
        raise GdnError(
            f"the type of {param.name!r} in signature ends in ':16'; it must not, since the kernel says "
            "do_not_specialize of it, and a launch does not look whether 16 divides it."
        )
    if one:
        return _number(param, 1, kind)
    if divisible:
        return Argument(kind, None, _Pointer(), [DIVISIBLE], f"{kind} divisible by 16")
    asks = kind in _INTEGERS and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    said = f"{kind}, any (a launch finds out whether 16 divides it: give sizes, or '{kind}:16')" if asks else kind
    return Argument(kind, None, _Pointer(), [], said)


def _sized(param: Any, value: Any, kind: str | None, divisible: bool, one: bool) -> Argument:
    """A number of a known value."""
    where = f"sizes[{param.name!r}]"
    if param.is_constexpr:
        raise bad(where, "given", "be left out: it is a tl.constexpr, whose value belongs in constants")
    if isinstance(value, bool | np.bool_):
        value = bool(value)
    elif isinstance(value, numbers.Integral):
        value = int(value)
    elif isinstance(value, numbers.Real):
        value = float(value)
    else:
        raise bad(where, f"{value!r}", "be a number, as a launch would be given")
    if kind is not None and kind.startswith("*"):
        raise bad(where, "given", f"be left out: {param.name!r} is an array ({kind!r}) in signature")
    if kind in _INTEGERS and (type(value) is not int or not _RANGES[kind][0] <= value <= _RANGES[kind][1]):
        raise bad(where, f"{value!r}", f"be an integer that fits into {kind}, its type in signature")
    if divisible and value % 16:
        raise bad(where, f"{value!r}", "be divisible by 16, as its type in signature says")
    if one and value != 1:
        raise bad(where, f"{value!r}", "be 1, as its type in signature says")
    return _number(param, value, kind)


def _number(param: Any, value: Any, kind: str | None) -> Argument:
    """The argument that a launch makes of a number: its type, and what it specialises on."""
    annotated = param.annotation_type
    if isinstance(value, bool | float):
        kind = annotated or kind or ("i1" if isinstance(value, bool) else "fp32")
        return Argument(kind, None, value, [], f"{value} ({kind}, any)")
    if kind is None:
        kind = next((name for name in ("i32", "i64", "u64") if _RANGES[name][0] <= value <= _RANGES[name][1]), None)
        if kind is None:
            raise bad(f"sizes[{param.name!r}]", f"{value}", "fit into 64 bits")
    kind = annotated or kind
    if param.do_not_specialize:
        return Argument(kind, None, value, [], f"{value} ({kind}, any: the kernel says do_not_specialize)")
    if value == 1 and not annotated:
        return Argument("constexpr", 1, 1, [], "1, a constant")
    if value % 16 == 0 and not param.do_not_specialize_on_alignment and kind in _INTEGERS:
        return Argument(kind, None, value, [DIVISIBLE], f"{value} ({kind} divisible by 16)")
    return Argument(kind, None, value, [], f"{value} ({kind}, any)")
