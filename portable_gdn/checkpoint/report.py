"""Describe what a checkpoint holds and what a port makes of it, as data for ``inspect`` and ``--dry-run``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .dequantise import Dequantising
from .families import ALL
from .families.family import MIXER_PIECES
from .output import Output
from .plan import Plan
from .table import Entry
from .targets import jax, maxtext

__all__ = ["describe_plan", "formats"]

_NUMBER = re.compile(r"(?<=[._])\d+(?=\.|$)")


def _template(name: str) -> str:
    """Return the name with its layer and expert replaced by "*"."""
    return _NUMBER.sub("*", name)


def _shape(shapes: Iterable[tuple[int, ...]]) -> str:
    found = list(dict.fromkeys(shapes))
    return " or ".join(str(list(shape)) for shape in found[:2]) + (" or others" if len(found) > 2 else "")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON: the source's tensors by kind, what each becomes, and the outputs."""
    source = plan.read
    becomes: dict[str, list[str]] = {}
    for output in (*plan.outputs, *plan.side):
        for name in output.sources:
            for part in source.checkpoint.regrouped[name].parts if name in source.checkpoint.regrouped else (name,):
                becomes.setdefault(part, []).append(output.name)
    rules = {name: group.rule for group in plan.skipped for name in group.names}
    few = source.checkpoint if isinstance(source.checkpoint, Dequantising) else None
    quantised, left_out = (few.quantised, few.left_out) if few is not None else ({}, {})
    applied = {part for made in quantised.values() for part in made.parts[1:]}
    for made in quantised.values():
        becomes[made.stored] = becomes.get(made.name, [])
        if made.name in rules:
            rules[made.stored] = rules[made.name]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, (_, tensor) in source.checkpoint.where.items():
        to = (
            ("side file: " + rules[name],)
            if name in rules
            else tuple(dict.fromkeys(map(_template, becomes.get(name, []))))
        )
        if name in plan.dequantised.values() or name in applied:
            to = ("applied to its weight",)
        if name in left_out:
            to = (f"left out: {left_out[name]}",)
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
        "beside": [{"name": file.name, "bytes": file.size} for file in plan.beside],
        "notes": list(plan.notes),
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


_INTRODUCTION = """\
# How each format lays out a linear-attention layer

Look up here how a checkpoint's tensors are laid out, for each family that `portable-gdn port` reads and each target
that it writes. To see it for a checkpoint of yours, with what each tensor becomes:

    portable-gdn inspect path/to/checkpoint

Each table has a row for every tensor of a linear-attention layer; `{i}` is the number of the layer. The layout says
how the tensor is put together from pieces. Commas separate its axes, an axis is a product of dimensions, and pieces
in parentheses follow one after the other along an axis. Three examples:

- `q: E, Hk Dk` is one piece, a matrix with E rows and Hk Dk columns;
- `(q Hk Dk | k Hk Dk | v Hk R Dv), E` has the rows of all queries first, then those of all keys, then those of all
  values;
- `Hk (q Dk | k Dk | v R Dv | z R Dv), E` is interleaved: it has, for each key head, that head's rows of all four
  pieces.

The dimensions are Hk key heads, R value heads per key head, their widths Dk and Dv, the hidden size E and the W taps
of the convolution; those in lower case, such as the ranks r and s, have a size of their own in each tensor. If a
tensor has two rows, checkpoints have one layout or the other.

The pieces are the projections q, k and v; the output gate z, or its factors g_a and g_b; beta b (in GDN-2, erase and
write); the input a of the decay, or f, or its factors f_a and f_b; the convolutions conv_q, conv_k and conv_v; the
parameters A_log and dt_bias of the decay; the norms o_norm, g_norm, lin_q_norm and lin_k_norm; and the output
projection out. An ending `_k` or `_2` means another shape of the same parameter: by key channel, or as in GDN-2.

`python -m portable_gdn.checkpoint.report` writes this page from the tables by which ports are made."""


def formats() -> str:
    """Return the linear-attention rows of all tables, as a page of the documentation."""
    text = [_INTRODUCTION]
    for family in ALL:
        text += ["", f"## {family.title} (`{family.name}`)", "", *_rows(family.table)]
        if family.zero_centred:
            text += ["", f"These norms multiply by 1 + w: {', '.join(family.zero_centred)}."]
        for rule in family.rules:
            where = "into the tree" if rule.tree else "into the side file"
            text += ["", f"Carried over unchanged {where}: {rule.name} (names that match `{rule.pattern}`)."]
    text += ["", "## Our tree (`jax`, `nnx`, `orbax`)", "", *_rows(jax.TABLE)]
    tree = maxtext.maxtext_dialect(ALL[0], "unscanned", None)
    text += ["", "## MaxText, unscanned (`maxtext`)", "", *_rows(tree.entries), ""]
    return "\n".join(text)


def _rows(table: Iterable[Entry]) -> list[str]:
    shown = [entry for entry in table if MIXER_PIECES.issuperset(entry.layout.pieces) and entry.layer < 0]
    bar = lambda text: text.replace("|", r"\|")  # noqa: E731 - a bar would end the cell
    return ["| tensor | layout |", "|---|---|", *(f"| `{e.name}` | `{bar(e.layout.text)}` |" for e in shown)]


if __name__ == "__main__":
    print(formats(), end="")
