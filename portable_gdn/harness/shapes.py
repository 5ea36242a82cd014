"""Calls of the rule described by their dimensions alone, for reports that compile them without computing anything."""

from __future__ import annotations

from typing import NamedTuple

from ..spec.errors import bad

__all__ = ["DTYPES", "OPERATIONS", "VARIANTS", "Shape", "check_shape", "operand_shapes"]

OPERATIONS = ("forward", "backward", "step")
#: The variants as users type them, and the granularity of g, erase and write: "head", "channel", "group" or none.
VARIANTS = {
    "gdn": ("head", None),
    "delta": (None, None),
    "kda": ("channel", None),
    "gdn2": ("channel", "channel"),
    "grouped": ("group", None),
    "gla": ("channel", "none"),
}
DTYPES = ("bfloat16", "float32", "float16")


class Shape(NamedTuple):
    """The dimensions and the dtype of a call.

    ``groups`` is the number of decays per head in the tile-grouped variant. ``sequences`` is the number of sequences
    that are packed in the row, each with a state of its own, or 0.
    """

    batch: int = 1
    seqlen: int = 2048
    heads: int = 16
    value_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    groups: int = 2
    sequences: int = 0


def check_shape(op: str, variant: str, shape: Shape) -> None:
    """Check an operation, a variant and a shape that a user typed.

    Raises:
        GdnError: the operation, the variant, the dtype or a dimension is not possible.
    """
    if op not in OPERATIONS:
        raise bad("--op", repr(op), f"be one of {', '.join(OPERATIONS)}")
    if variant not in VARIANTS:
        raise bad("--variant", repr(variant), f"be one of {', '.join(VARIANTS)}")
    if shape.dtype not in DTYPES:
        raise bad("--dtype", repr(shape.dtype), f"be one of {', '.join(DTYPES)}")
    for name in ("batch", "seqlen", "heads", "value_heads", "key_dim", "value_dim", "groups"):
        if getattr(shape, name) < 1:
            raise bad("--" + name.replace("_", "-"), getattr(shape, name), "be at least 1")
    if shape.sequences < 0:
        raise bad("--sequences", shape.sequences, "be at least 0")
    if shape.sequences and (shape.batch != 1 or op == "step"):
        raise bad(
            "--sequences", shape.sequences, "be 0 for a step or more than one row: sequences are packed in one row"
        )
    if variant == "grouped" and shape.key_dim % shape.groups:
        raise bad("--groups", shape.groups, f"divide --key-dim, which is {shape.key_dim}")


def operand_shapes(op: str, variant: str, shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the dtype of each operand of the rule but the state, by name.

    All are float32 except q, k and v.
    """
    B, T, H, HV, K, V, dtype, n, _ = shape
    decay, gates = VARIANTS[variant]
    lead = (B,) if op == "step" else (B, T)
    x = {"q": ((*lead, H, K), dtype), "k": ((*lead, H, K), dtype), "v": ((*lead, HV, V), dtype)}
    if decay is not None:
        x["g"] = (*lead, HV, *{"head": (), "channel": (K,), "group": (n,)}[decay]), "float32"
    if gates is None:
        x["beta"] = (*lead, HV), "float32"
    elif gates == "channel":
        x |= {"erase": ((*lead, HV, K), "float32"), "write": ((*lead, HV, V), "float32")}
    return x
