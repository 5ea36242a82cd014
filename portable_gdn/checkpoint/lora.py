"""Adapters of low rank (LoRA) on projections, by the same tables as the projections themselves.

A projection [out, in] has factors B [out, r] and A [r, in]; its change is B A. Where the target splits the projection's
rows, B is split as they are and every part gets A whole; where it is transposed, so are both. On the way back all parts
must still have the same A. PEFT's names are read and written: ``<module>.lora_A.weight`` and ``.lora_B.weight``; in our
tree the factors are those of nnx.LoRA, ``<module>.lora.lora_a`` [in, r] and ``lora_b`` [r, out]. Alpha and r stay in
adapter_config.json.
"""

from __future__ import annotations

from collections.abc import Iterable

from .layout import layout
from .table import Dialect, Entry

__all__ = ["PREFIX", "is_adapter", "with_factors"]

PREFIX = "base_model.model."
_RANK = "rank"


def is_adapter(names: Iterable[str]) -> bool:
    """Whether these are tensors of an adapter."""
    return any(".lora_A." in name for name in names)


def with_factors(dialect: Dialect) -> Dialect:
    """The dialect of adapters on a dialect's projections."""
    rows: list[Entry] = []
    for entry in dialect.entries:
        axes = [part.strip() for part in entry.layout.text.partition(":")[2].split(",")]
        plain = entry.layout.joined is None
        if not plain:
            axes = [part.strip() for part in entry.layout.text.split(",")]
        if len(axes) != 2 or "1" in axes or any(axis.startswith("@") for axis in axes):
            continue
        pieces = entry.layout.pieces
        if entry.name.endswith(".weight") and entry.layout.joined in (None, 0):
            base = entry.name.removesuffix("weight")
            names, (out, inside) = (base + "lora_A.weight", base + "lora_B.weight"), axes
            a, b = f"{_RANK}, {inside}", f"{_marked(out, pieces)}, {_RANK}"
        elif entry.name.endswith(".kernel") and plain:
            base = entry.name.removesuffix("kernel")
            names, (inside, out) = (base + "lora.lora_a", base + "lora.lora_b"), axes
            a, b = f"{inside}, {_RANK}", f"{_RANK}, {out}"
        else:
            continue
        shared = " & ".join(f"{piece}#A" for piece in pieces)
        options = {"period": entry.period, "places": entry.places, "when": entry.when, "layer": entry.layer}
        rows.append(Entry(names[0], layout(f"{shared}: {a}"), **options))  # type: ignore[arg-type]
        rows.append(Entry(names[1], layout(f"{pieces[0]}#B: {b}" if plain else b), **options))  # type: ignore[arg-type]
    return Dialect(dialect.name, tuple(rows), dialect.prefix, dialect.spelled)


def _marked(axis: str, pieces: tuple[str, ...]) -> str:
    """The axis with its pieces named as factors."""
    words = axis.replace("(", "( ").replace(")", " )").split()
    starts = [n for n, word in enumerate(words) if n and words[n - 1] in ("(", "|")]
    return " ".join(word + "#B" if n in starts and word in pieces else word for n, word in enumerate(words))
