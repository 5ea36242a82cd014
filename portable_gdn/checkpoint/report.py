"""What a checkpoint holds and what a port makes of it, as data for ``inspect`` and ``--dry-run``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .plan import Output, Plan

__all__ = ["describe_plan"]

_NUMBER = re.compile(r"(?<=[._])\d+(?=\.|$)")


def _template(name: str) -> str:
    """The name with its layer and expert as "*"."""
    return _NUMBER.sub("*", name)


def _shape(shapes: Iterable[tuple[int, ...]]) -> str:
    found = list(dict.fromkeys(shapes))
    return " or ".join(str(list(shape)) for shape in found[:2]) + (" or others" if len(found) > 2 else "")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: the source's tensors by kind with what each becomes, and what goes where."""
    source = plan.read
    becomes: dict[str, list[str]] = {}
    for output in (*plan.outputs, *plan.side):
        for name in output.sources:
            becomes.setdefault(name, []).append(output.name)
    rules = {name: group.rule for group in plan.skipped for name in group.names}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, (_, tensor) in source.checkpoint.where.items():
        to = (
            ("side file: " + rules[name],)
            if name in rules
            else tuple(dict.fromkeys(map(_template, becomes.get(name, []))))
        )
        if name in plan.dequantised.values():
            to = ("applied to its weight",)
        groups.setdefault((_template(name), tensor.dtype, *to), []).append(name)
    where = source.checkpoint.where
    rows = [
        {
            "source": template,
            "count": len(names),
            "dtype": dtype,
            "shape": _shape(where[name][1].shape for name in names),
            "bytes": sum(where[name][1].nbytes for name in names),
            "becomes": list(to),
        }
        for (template, dtype, *to), names in groups.items()
    ]
    mixer = source.mixer
    return {
        "source": str(source.checkpoint.folder),
        "family": source.family.name,
        "title": source.family.title,
        "target": plan.target,
        "sizes": source.sizes,
        "linear_layers": source.linear_layers,
        "mixer": None if mixer is None else mixer.as_dict(),
        "tensors": rows,
        "outputs": _outputs(plan.outputs),
        "aside": [{"rule": group.rule, "names": list(group.names)} for group in plan.skipped],
        "casts": {name: list(pair) for name, pair in plan.casts.items()},
        "source_bytes": source.checkpoint.nbytes,
        "target_bytes": sum(output.nbytes for output in plan.outputs),
        "side_bytes": sum(output.nbytes for output in plan.side),
        "notes": list(source.notes),
    }


def _outputs(outputs: list[Output]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Output]] = {}
    for output in outputs:
        groups.setdefault((_template(output.name), output.spec.dtype), []).append(output)
    return [
        {
            "name": template,
            "count": len(members),
            "dtype": dtype,
            "shape": _shape(output.spec.shape for output in members),
            "bytes": sum(output.nbytes for output in members),
        }
        for (template, dtype), members in groups.items()
    ]
