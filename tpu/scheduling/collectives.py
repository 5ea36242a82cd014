"""What devices send each other: the collectives in a compiled module's text. It does not import jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..slices import Slice
from .hlo import Module, Operation

__all__ = ["KINDS", "Collective", "collectives", "kind_of"]

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


class Collective(NamedTuple):
    """A collective operation of a program.

    name, kind, source: the module's name, one of ``KINDS``, and the operation of the traced program.
    arrays: what a device has of it, as text ("f32[1,32,128,128]").
    bytes: of these arrays, tiles filled up as they are sent: of a gather those that a device ends with, of a scatter
    those that it begins with.
    times: how often the program runs it; None where that depends on values.
    groups: devices that take part together; of a permute (from, to) each.
    """

    name: str
    kind: str
    source: str
    arrays: tuple[str, ...]
    bytes: int
    times: int | None
    groups: tuple[tuple[int, ...], ...]

    def seconds(self, where: Slice) -> float:
        """Time of one run of it, of the links alone."""
        return where.seconds(
            "all-gather" if self.kind == "collective-broadcast" else self.kind, self.bytes, self.groups
        )


def kind_of(opcode: str) -> str | None:
    """The kind of a collective operation, or of the start of one; None for another one."""
    kind = opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def collectives(text: str, module: Module, times: Mapping[str, int | None], devices: int) -> Iterator[Collective]:
    """The collectives that a program runs, those inside of asynchronous wrappers too.

    Args:
        text: of the module.
        module: the same, parsed.
        times: how often operations run, as far as it is known.
        devices: of the program.
    """
    lines = {m[1]: m[0] for m in re.finditer(r"^\s*(?:ROOT )?%(\S+) = .*$", text, re.MULTILINE)}
    for operation in module.operations:
        kind = kind_of(operation.opcode)
        if kind is None:
            continue
        arrays = operation.operands if kind == "reduce-scatter" else operation.results
        if operation.opcode.endswith("-start"):  # its results are what goes in, and what comes out
            arrays = operation.operands if kind != "all-gather" else operation.results[len(operation.operands) :]
        arrays = tuple(a for a in arrays if a.shape)
        groups = tuple(_groups(lines.get(operation.name, ""), kind, devices))
        if not any(len(set(group)) > 1 for group in groups):
            continue
        yield Collective(
            operation.name,
            kind,
            operation.source.rpartition("jit(flat)/")[2] or operation.source,
            tuple(map(str, arrays)),
            sum(a.bytes for a in arrays),
            _times(operation, module, times),
            groups,
        )


def _times(operation: Operation, module: Module, times: Mapping[str, int | None]) -> int | None:
    if operation.name in times:
        return times[operation.name]
    caller = [o for o in module.operations if operation.computation in o.called]
    if caller:
        return (
            _times(caller[0], module, times)
            if not caller[0].opcode.startswith("while")
            else _beside(operation, module, times)
        )
    return 1


def _beside(operation: Operation, module: Module, times: Mapping[str, int | None]) -> int | None:
    beside = [o.name for o in module.operations if o.computation == operation.computation and o.name in times]
    return times[beside[0]] if beside else None


def _groups(line: str, kind: str, devices: int) -> Iterator[tuple[int, ...]]:
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}", line)
        yield from _listed(pairs[1] if pairs else "")
        return
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", line)
    if listed:
        found = list(_listed(listed[1]))
        yield from found or [tuple(range(devices))]
        return
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if counted:
        order = np.arange(math.prod(_numbers(counted[2]))).reshape(_numbers(counted[2]))
        order = order.transpose(_numbers(counted[3])) if counted[3] else order
        rows = order.reshape(_numbers(counted[1]))
        yield from (tuple(map(int, row)) for row in rows)
        return
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = {m[1]: int(m[2]) for m in re.finditer(r"'([^']*)'=(\d+)", named[1])}
        taken = re.findall(r"'([^']*)'", named[2])
        names = list(sizes)
        order = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        axes = [names.index(n) for n in names if n not in taken] + [names.index(n) for n in taken]
        rows = order.transpose(axes).reshape(-1, math.prod(sizes[n] for n in taken))
        yield from (tuple(map(int, row)) for row in rows)
        return
    yield tuple(range(devices))


def _listed(text: str) -> Iterator[tuple[int, ...]]:
    yield from (tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", text) if group)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
