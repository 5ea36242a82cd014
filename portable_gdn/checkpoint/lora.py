"""Tables for LoRA adapters, derived from the tables of the projections that they belong to.

A projection [out, in] has the factors B [out, r] and A [r, in], and the update B A. Where the target splits the rows of
the projection, the rows of B are split in the same way and every part gets the whole A. Where the target transposes the
projection, both factors are transposed. On the way back, all parts must still have the same A (``joining`` handles
parts with factors of their own). DoRA's magnitudes and B's biases have one number per row and are split like B. Other
tensors of an adapter (``modules_to_save``, biases) are plain tensors and use the plain table rows.

PEFT's names are read and written: ``<module>.lora_A.weight`` and ``.lora_B.weight``. In a state dict that PEFT did not
save, the adapter's name stands in between (``lora_A.default.weight``); such a name is called a slot. A single slot is
written without its name. In our tree the factors are those of nnx.LoRA: ``<module>.lora.lora_a`` [in, r] and ``lora_b``
[r, out], or ``<module>.lora.<slot>.lora_a`` if there are several slots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..spec.errors import GdnError
from .families.family import Rule
from .layout import layout
from .table import Dialect, Entry

__all__ = [
    "ADAPTER_RULES", "CONFIG", "PREFIX", "RANK", "Factor", "Slots", "factor_of", "is_adapter", "is_factor",
    "refuse_others", "slots_of", "with_factors",
]  # fmt: skip

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
RANK = "rank"

ADAPTER_RULES = (Rule("the base model's own weights, which modules_to_save replaces", r".*\.original_module\..*"),)

_FACTOR = re.compile(
    r"(?P<module>.*)\.lora_(?P<kind>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)(?P<slot>[A-Za-z0-9_\-]+))?(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"\.modules_to_save\.(?P<slot>[A-Za-z0-9_\-]+)\.")

_OTHERS = {  # parts of names that occur only in adapters of other kinds
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "lora_E": "AdaLoRA",
    "lora_down": "LoRA in kohya's names",
    "ia3_l": "IA3",
    "oft_": "OFT",
    "boft_": "BOFT",
    "vera_lambda": "VeRA",
    "randlora_": "RandLoRA",
    "hra_u": "HRA",
    "fourierft_spectrum": "FourierFT",
    "bone_": "Bone",
    "shira_weight": "SHiRA",
    "ln_tuning_": "LN tuning",
    "trainable_tokens_": "trainable tokens",
    "prompt_embeddings": "a soft prompt",
}


@dataclass(frozen=True)
class Factor:
    """The contents of a factor's name: its module, which factor it is, and the adapter's slot ("" if there is none)."""

    module: str
    kind: str
    slot: str
    leaf: str


def factor_of(name: str) -> Factor | None:
    """Parse the name of a factor; None if it is not the name of one."""
    found = _FACTOR.fullmatch(name)
    if found is None:
        return None
    return Factor(found["module"], found["kind"], found["slot"] or "", found["leaf"] or "")


def is_adapter(names: Iterable[str]) -> bool:
    """Whether these are the tensors of an adapter of any kind."""
    return any(factor_of(name) is not None or _other(name) is not None for name in names)


def is_factor(piece: str) -> bool:
    """Whether a piece is a factor of an adapter (and not a plain tensor, or a tensor of block scales)."""
    return "#" in piece and piece.partition("#")[2][0] in "ABMC"


def _other(name: str) -> str | None:
    return next((kind for mark, kind in _OTHERS.items() if "." + mark in name or name.startswith(mark)), None)


def refuse_others(names: Iterable[str], config: Mapping[str, Any], where: object) -> None:
    """Refuse adapters that are not LoRA.

    Raises:
        GdnError: The adapter is of another kind, which the message names.
    """
    said = config.get("peft_type")
    told = next(((kind, name) for name in names if (kind := _other(name)) is not None), None)
    if told is None and said not in (None, "LORA"):
        told = str(said), CONFIG
    if told is not None:
        raise GdnError(
            f"{where} is an adapter of kind {told[0]} ({told[1]} tells); only LoRA's factors can be ported, rsLoRA's "
            f"and DoRA's among them, so it must be merged into its model first."
        )


@dataclass(frozen=True)
class Slots:
    """The names of the adapters in one checkpoint."""

    names: tuple[str, ...] = ("",)

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that tell slots apart; only "" if there is one slot."""
        return self.names if len(self.names) > 1 else ("",)

    def canonical(self, name: str) -> str:
        """Return a tensor's name as PEFT saves it, with the slot's mark and without the prefixes of PEFT's wrappers."""
        found = factor_of(name)
        if found is None:
            return _SAVED.sub(".", name).replace(".base_layer.", ".")
        mark = "" if len(self.names) == 1 or not found.slot else "." + found.slot
        leaf = "" if found.kind not in ("A", "B") else "." + (found.leaf or "weight")
        return f"{found.module}.lora_{found.kind}{mark}{leaf}"


def slots_of(names: Iterable[str]) -> Slots:
    """Return the slots of an adapter's factors."""
    found = {factor.slot for factor in map(factor_of, names) if factor is not None}
    return Slots(tuple(sorted(found)) or ("",))


def with_factors(dialect: Dialect, slots: Slots = Slots()) -> Dialect:
    """Return the dialect of adapters on a dialect's projections; it also has the dialect's own rows."""
    rows: list[Entry] = []
    for mark in slots.marks:
        rows += _factors(dialect, mark)
        rows += _parts(dialect, mark)
    return Dialect(dialect.name, (*rows, *dialect.entries), dialect.prefix, dialect.spelled)


def _factors(dialect: Dialect, mark: str) -> Iterator[Entry]:
    """Yield the rows of factors on whole projections."""
    for entry in dialect.entries:
        axes = [part.strip() for part in entry.layout.text.partition(":")[2].split(",")]
        plain = entry.layout.joined is None
        if not plain:
            axes = [part.strip() for part in entry.layout.text.split(",")]
        if len(axes) != 2 or any(axis.startswith("@") for axis in axes):
            continue
        base, _, leaf = entry.name.rpartition(".")
        embedding = entry.layout.pieces == ("embed",)
        if leaf == "weight" and entry.layout.joined in (None, 0):
            yield from _peft(base, entry, axes, mark, embedding)
        elif leaf in ("kernel", "embedding") and plain:
            yield from _tree(base, entry, axes, mark)


def _peft(base: str, entry: Entry, axes: list[str], mark: str, embedding: bool) -> Iterator[Entry]:
    slot = "." + mark if mark else ""
    out, inside = axes
    if embedding:  # PEFT exchanges the roles of an embedding's factors
        yield _row(entry, f"{base}.lora_embedding_A{slot}", f"embed#A{_tail(mark)}: {RANK}, {out}")
        yield _row(entry, f"{base}.lora_embedding_B{slot}", f"embed#B{_tail(mark)}: {inside}, {RANK}")
        return
    pieces = entry.layout.pieces
    shared = " & ".join(f"{piece}#A{_tail(mark)}" for piece in pieces)
    yield _row(entry, f"{base}.lora_A{slot}.weight", f"{shared}: {RANK}, {inside}")
    yield _row(entry, f"{base}.lora_B{slot}.weight", _by_rows(out, pieces, "B" + _tail(mark), RANK))
    yield _row(entry, f"{base}.lora_B{slot}.bias", _by_rows(out, pieces, "C" + _tail(mark)))
    yield _row(entry, f"{base}.lora_magnitude_vector{slot}", _by_rows(out, pieces, "M" + _tail(mark)))


def _tree(base: str, entry: Entry, axes: list[str], mark: str) -> Iterator[Entry]:
    (piece,) = entry.layout.pieces
    inside, out = axes
    under, tail = base + ".lora." + (mark + "." if mark else ""), _tail(mark)
    yield _row(entry, under + "lora_a", f"{piece}#A{tail}: {inside}, {RANK}")
    yield _row(entry, under + "lora_b", f"{piece}#B{tail}: {RANK}, {out}")
    yield _row(entry, under + "lora_b_bias", f"{piece}#C{tail}: {out}")
    yield _row(entry, under + "magnitude", f"{piece}#M{tail}: {out}")


_PART_NAMES = {
    "q": ("q_proj", "in_proj_q"),
    "k": ("k_proj", "in_proj_k"),
    "v": ("v_proj", "in_proj_v"),
    "z": ("z_proj", "in_proj_z", "g_proj"),
    "b": ("b_proj", "in_proj_b"),
    "a": ("a_proj", "in_proj_a"),
}


def _parts(dialect: Dialect, mark: str) -> Iterator[Entry]:
    """Yield the rows of factors on parts of a joined projection, for adapters that were trained on separate parts."""
    taken = {entry.name for entry in dialect.entries}
    for entry in dialect.entries:
        lay = entry.layout
        if lay.joined != 0 or len(lay.axes) != 2 or lay.indices or not entry.name.endswith(".weight"):
            continue
        under = entry.name.removesuffix(".weight").rpartition(".")[0] + "."
        inside = entry.layout.text.rpartition(",")[2].strip()
        for piece, dims in lay.segments:
            for name in _PART_NAMES.get(piece, ()):
                if under + name + ".weight" in taken:
                    continue
                out = " ".join((*lay.axes[0], *dims))
                part = Entry(under + name + ".weight", layout(f"{piece}: {out}, {inside}"), when=entry.when)
                yield from _peft(under + name, part, [out, inside], mark, False)


def _row(entry: Entry, name: str, text: str) -> Entry:
    return Entry(name, layout(text), entry.period, entry.places, entry.when, entry.layer)


def _tail(mark: str) -> str:
    return "~" + mark if mark else ""


def _by_rows(axis: str, pieces: tuple[str, ...], kind: str, behind: str = "") -> str:
    """Return the layout of a tensor that has the projection's rows: B, and vectors."""
    rest = f", {behind}" if behind else ""
    if len(pieces) == 1 and "(" not in axis:
        return f"{pieces[0]}#{kind}: {axis}{rest}"
    words = axis.replace("(", "( ").replace(")", " )").split()
    starts = [n for n, word in enumerate(words) if n and words[n - 1] in ("(", "|")]
    named = " ".join(word + "#" + kind if n in starts and word in pieces else word for n, word in enumerate(words))
    return named + rest
