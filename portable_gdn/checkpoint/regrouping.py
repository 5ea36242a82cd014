"""Handle convolutions that transformers saved in equal chunks instead of at the heads' widths.

transformers keeps OLMo-Hybrid's three convolutions as one tensor, and its ``save_pretrained`` (5.24) cuts that with
``torch.chunk``: for example into 43, 43 and 42 rows, where queries, keys and values have 32, 32 and 64. Concatenated,
the three chunks are the original tensor. So a port joins them and cuts them at the heads' widths, and the way back cuts
them into chunks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from .dtypes import dtype_of
from .families import Family
from .output import Output
from .reader import Checkpoint, Regrouped
from .table import Dialect, Spec

__all__ = ["chunked", "note", "regroup"]


def chunked(
    family: Family, dialect: Dialect, inventory: Mapping[str, Spec], sizes: Mapping[str, int]
) -> dict[str, Regrouped]:
    """Return the tensors that hold the pieces of ``family.chunked`` in equal chunks, and what each should hold, by
    name.

    This applies only to layers that have all of these tensors in one dtype, with exactly the lengths that
    ``torch.chunk`` gives, where these differ from the heads' widths. ``bind`` refuses all other wrong shapes.
    """
    layers: dict[tuple[int, ...], dict[str, tuple[str, int]]] = {}
    for name in inventory:
        entries, numbers = dialect.rows(name)
        for entry in entries:
            piece, rows = entry.layout.pieces[0], entry.layout.axes[0]
            if piece in family.chunked and all(dim in sizes for dim in rows):
                layers.setdefault(numbers, {})[piece] = name, prod(sizes[dim] for dim in rows)
    found: dict[str, Regrouped] = {}
    for layer in layers.values():
        if len(layer) < len(family.chunked):
            continue
        names, wanted = zip(*(layer[piece] for piece in family.chunked), strict=True)
        specs = [inventory[name] for name in names]
        have = [spec.shape[0] if spec.shape else 0 for spec in specs]
        each = -(-sum(wanted) // len(wanted))
        chunks = [min(each, sum(wanted) - n * each) for n in range(len(wanted))]
        alike = len({(spec.dtype, spec.shape[1:]) for spec in specs}) == 1
        if alike and have == chunks and min(chunks) > 0 and have != list(wanted):
            for n, name in enumerate(names):
                found[name] = Regrouped(names, sum(wanted[:n]), wanted[n])
    return found


def note(regrouped: Mapping[str, Regrouped]) -> str:
    """Return a sentence about the tensors that were regrouped."""
    first = next(iter(regrouped.values()))
    return (
        f"{len(regrouped)} convolutions ({', '.join(first.parts)}, ...) are in equal thirds, as transformers' "
        f"save_pretrained cuts them, and are cut at the heads' widths instead; --back cuts them in thirds again"
    )


def regroup(output: Output, spec: Spec, regrouped: Mapping[str, Regrouped], made: Mapping[str, Output],
            port: Checkpoint, lengths: Mapping[str, int]) -> Output:  # fmt: skip
    """Return the chunk that the source had under the name of ``output``.

    Args:
        output: The output of this name, cut at the heads' widths.
        spec: The dtype and shape that the source had under this name.
        regrouped: What ``chunked`` returned.
        made: All outputs that are cut at the heads' widths, by name.
        port: The port that holds them.
        lengths: The number of rows of every chunk, by name.
    """
    parts = regrouped[output.name].parts
    begin = sum(lengths[name] for name in parts[: parts.index(output.name)])
    end = begin + lengths[output.name]
    near = [n for n in parts if regrouped[n].begin < end and begin < regrouped[n].begin + regrouped[n].rows]
    first = regrouped[near[0]].begin
    return Output(
        output.name,
        spec,
        cast=any(made[name].cast for name in near),
        computed=_rows([made[name] for name in near], begin - first, end - first, port),
        made_of=tuple(dict.fromkeys(source for name in near for source in made[name].sources)),
    )


def _rows(outputs: list[Output], begin: int, end: int, port: Checkpoint) -> Callable[[], np.ndarray]:
    def computed() -> np.ndarray:
        found = []
        for output in outputs:
            filled = output.fill((0, -1), output.moves((0, -1), port.array))
            found.append(filled.reshape(-1).view(dtype_of(output.spec.dtype)).reshape(output.spec.shape))
        return np.concatenate(found)[begin:end]

    return computed
