"""Read a compiled module's text: which operations a device runs, and where their operands lie, without jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

__all__ = ["Array", "Module", "Moved", "Operation", "moves", "parse"]

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}


class Array(NamedTuple):
    """An array as it lies in memory: element type, dimensions, memory ("hbm", "vmem", ...), bytes with tile padding."""

    dtype: str
    shape: tuple[int, ...]
    memory: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Operation(NamedTuple):
    """One operation of the compiled module.

    name, opcode; kernel: whether it is a Pallas kernel; results, operands, each once; source: the operation of the
    traced program that it came from; vmem: bytes of VMEM that it uses; inputs: names of the operands; computation: in
    which it stands; across: whether it copies while the program before this one still runs; called: the computations
    that it runs.
    """

    name: str
    opcode: str
    kernel: bool
    results: tuple[Array, ...]
    operands: tuple[Array, ...]
    source: str
    vmem: int
    inputs: tuple[str, ...] = ()
    computation: str = ""
    across: bool = False
    called: tuple[str, ...] = ()


class Moved(NamedTuple):
    """Bytes that XLA moves between HBM and VMEM for an operation by copies of their own, beside what runs before or
    behind it; across: those among them that are moved while the program before this one still runs."""

    bytes: int
    across: int

    def __add__(self, other: object) -> Moved:
        """The sum of both."""
        assert isinstance(other, Moved)
        return Moved(self.bytes + other.bytes, self.across + other.across)


class Module(NamedTuple):
    """Operations in the order of the text, and the values of constant integer operands by operation and place."""

    operations: tuple[Operation, ...]
    constants: dict[tuple[str, int], np.ndarray]


class _Line(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


_DEFINITION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\](?:\{([0-9,]*)((?::[^{}]*)?)\})?")
_CALLED = re.compile(r"(?:condition|body|calls|\w+_computations?)=(\{[^}]*\}|%\S+)")
#: Their computations are part of the operation itself.
_FUSED = ("fusion", "reduce", "sort", "map", "scatter", "reduce-window", "select-and-scatter", "all-reduce")
_NAMES = ("bitcast", "get-tuple-element", "tuple", "opt-barrier")
_PASSES_ON = ("copy", "bitcast", "reshape", "copy-start", "copy-done", "get-tuple-element")


def parse(text: str, values: Mapping[int, np.ndarray] | None = None) -> Module:
    """The operations of a scheduled module.

    Args:
        values: integers of those parameters of the module that are known, by number.
    """
    computations, entry = _computations(text)
    lines = {line.name: line for body in computations.values() for line in body}
    operations: list[Operation] = []
    constants: dict[tuple[str, int], np.ndarray] = {}
    for name in _executed(computations, entry):
        for line in computations[name]:
            kernel = line.opcode == "custom-call" and "tpu_custom_call" in line.rest
            inputs = tuple(operand for operand in dict.fromkeys(line.operands) if operand in lines)
            operands = tuple(a for operand in inputs for a in _arrays(lines[operand].type))
            target = _after(line.rest, 'custom_call_target="', '"')
            opcode = target if target == "ConcatBitcast" else line.opcode
            operations.append(
                Operation(
                    line.name, opcode, kernel, tuple(_arrays(line.type)), operands,
                    _after(line.rest, 'op_name="', '"'), _vmem(line.rest), inputs, name,
                    "cross_program_prefetch_index" in line.rest, tuple(_called(line)),
                )
            )  # fmt: skip
            for place, operand in enumerate(line.operands if kernel else ()):
                known = _constant(lines, operand, values or {})
                if known is not None:
                    constants[line.name, place] = known
    return Module(tuple(operations), constants)


def moves(module: Module) -> tuple[dict[str, Moved], dict[str, Moved]]:
    """What asynchronous copies move between HBM and VMEM, by the operation that it is moved for: the first that takes
    what came, or the one that made what leaves. And by copy what is moved for none that is seen (a loop's operand)."""
    known = {operation.name: operation for operation in module.operations}
    found: dict[str, Moved] = {}
    others: dict[str, Moved] = {}
    for start in module.operations:
        if not start.opcode.endswith("-start"):
            continue
        ends = [a for a in start.results if a.memory in ("hbm", "vmem") and a.shape]
        if len(ends) < 2 or ends[0].memory == ends[1].memory:
            continue
        to = ends[0] if start.opcode == "copy-start" else ends[1]
        whose = _taker(module, start) if to.memory == "vmem" else _maker(known, start)
        moved = Moved(min(a.bytes for a in ends[:2]), 0)
        moved = moved._replace(across=moved.bytes if start.across else 0)
        where, name = (others, start.name) if whose is None else (found, whose)
        where[name] = where.get(name, Moved(0, 0)) + moved
    return found, others


def _handed_on(operation: Operation) -> bool:
    """Whether it is but another name of its operands."""
    return operation.opcode.endswith("-done") or operation.opcode in (*_NAMES, "ConcatBitcast")


def _taker(module: Module, start: Operation) -> str | None:
    names = {start.name}
    for operation in module.operations:
        if operation.computation != start.computation or not names.intersection(operation.inputs):
            continue
        if operation.opcode in ("while", "conditional", "call"):
            return None
        if _handed_on(operation):
            names.add(operation.name)
        else:
            return operation.name
    return None


def _maker(known: Mapping[str, Operation], start: Operation) -> str | None:
    operation = start
    while operation is start or _handed_on(operation):
        before = [known[name] for name in operation.inputs if name in known]
        if not before:
            return None
        operation = before[0]
    return None if operation.opcode in ("parameter", "while", "conditional", "call") else operation.name


def _after(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _vmem(rest: str) -> int:
    """Bytes of VMEM that the compiler says it used: that is its memory number 1."""
    used = _after(rest, '"used_scoped_memory_configs":[', "]")
    return sum(int(m[1]) for m in re.finditer(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used))


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    found: dict[str, list[_Line]] = {}
    name, entry = "", ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and " = " not in line.partition("(")[0]:
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
            continue
        match = _DEFINITION.match(line)
        if match and name:
            found[name].append(_line(match[1], match[2]))
    return found, entry


def _line(name: str, text: str) -> _Line:
    """Type, operation, operands and attributes: the type may be a tuple in parentheses with comments in it."""
    text = re.sub(r"/\*index=\d+\*/", "", text)
    if text.startswith("("):
        close = _closing(text, 0)
        kind, rest = text[: close + 1], text[close + 1 :].lstrip()
    else:
        kind, _, rest = text.partition(" ")
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : close]
    operands = tuple(re.findall(r"%([^\s,()]+)", inside)) if opcode not in ("constant", "parameter") else (inside,)
    return _Line(name, kind, opcode.strip(), operands, rest[close + 1 :])


def _closing(text: str, at: int) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0 and text[i] == ")":
            return i
    return len(text)


def _executed(computations: dict[str, list[_Line]], entry: str) -> Iterator[str]:
    """Computations whose operations a device runs one by one: those of loops and branches, not of fusions."""
    pending, seen = [entry], set()
    while pending:
        name = pending.pop(0)
        if name not in computations or name in seen:
            continue
        seen.add(name)
        yield name
        for line in computations[name]:
            pending += _called(line)


def _called(line: _Line) -> Iterator[str]:
    """Computations that an operation runs beside its own code."""
    if line.opcode not in _FUSED:
        for called in _CALLED.findall(line.rest):
            yield from re.findall(r"%([^\s,{}]+)", called)


def _arrays(kind: str) -> Iterator[Array]:
    for dtype, dims, order, layout in _ARRAY.findall(kind):
        bits = re.search(r"(\d+)", dtype)
        size = _BYTES.get(dtype) or (int(bits[1]) / 8 if bits else 0)
        shape = tuple(int(d) for d in dims.split(",") if d)
        space = re.search(r"S\((\d+)\)", layout)
        memory = {"1": "vmem", "2": "sflag", "5": "host", "6": "smem"}.get(space[1] if space else "", "hbm")
        yield Array(dtype, shape, memory, int(size * math.prod(_padded(shape, order, layout))))


def _padded(shape: tuple[int, ...], order: str, layout: str) -> list[int]:
    """Dimensions with those that a tile covers rounded up to it."""
    tile = re.search(r"T\(([0-9,]+)\)", layout)
    dims = list(shape)
    minor = [int(d) for d in order.split(",") if d]
    if tile and minor:
        for extent, d in zip([int(t) for t in tile[1].split(",")][::-1], minor, strict=False):
            dims[d] = -(-dims[d] // extent) * extent
    return dims


def _constant(lines: dict[str, _Line], name: str, values: Mapping[int, np.ndarray]) -> np.ndarray | None:
    """The integers of an operand that is a constant or a known parameter, copied or reshaped perhaps."""
    while name in lines:
        line = lines[name]
        if line.opcode == "constant" and line.type.startswith(("s32", "u32")) and "..." not in line.operands[0]:
            return np.array([int(n) for n in re.findall(r"-?\d+", line.operands[0])], np.int64)
        if line.opcode == "parameter":
            return values.get(int(line.operands[0]))
        if line.opcode not in _PASSES_ON or len(line.operands) != 1:
            return None
        name = line.operands[0]
    return None
