"""The arguments for which a kernel is compiled: the type of each parameter, and the specialisation of its value.

A launch inspects its integers: the compiler learns which are divisible by 16, and an integer that is 1 becomes a
constant. Both change the generated code. Without divisibility there are no asynchronous copies, and therefore no
pipeline through shared memory.
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
NEAR = ["tt.pointer_range", 32]  # for AMD's compiler: 32-bit offsets reach the whole array


class Argument(NamedTuple):
    """One parameter as it is compiled.

    ``type`` is Triton's type, or "constexpr" for a constant with this ``value``. ``seen`` is what a heuristic gets.
    ``attributes`` are Triton's attributes for what is known of the value, and ``said`` describes all of it to a reader.
    """

    type: str
    value: Any
    seen: Any
    attributes: list[list[Any]]
    said: str


class _Pointer:
    """The placeholder that a heuristic gets in place of an array."""


def arguments_of(
    kernel: Any, signature: Mapping[str, str], sizes: Mapping[str, Any], target: Target
) -> dict[str, Argument]:
    """Return the parameters that a signature or a size names, by name.

    Raises:
        GdnError: a type is not one of Triton's, or a size does not fit its type.
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
    """Parse Triton's notation: return the type, whether the value is divisible by 16, and whether it is 1."""
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
    """Return "; did you mean ...?" if there is a similar type, or a full stop if there is none."""
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
    """Return the argument for an array of torch: its address is divisible by 16, and on AMD it is below 2 GiB."""
    near = target.backend == "hip"
    said = f"{kind} divisible by 16" + (", of less than 2 GiB" if near else "")
    return Argument(kind, None, _Pointer(), [DIVISIBLE, NEAR] if near else [DIVISIBLE], said)


def _typed(param: Any, kind: str, divisible: bool, one: bool) -> Argument:
    """Return the argument for a number of which only the suffix of its type is known."""
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
    """Return the argument for a number of known value."""
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
    """Return the argument that a launch would make of a number: its type and its specialisation."""
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
