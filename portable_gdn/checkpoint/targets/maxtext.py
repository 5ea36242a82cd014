"""MaxText's parameter trees for Qwen3-Next and Qwen3.5 with experts, as its release 0.2.5 has them.

The query kernel has q and its gate side by side in each head's last axis; the linear layers keep Qwen3-Next's
interleaved projection, also for Qwen3.5. Norm scales keep the files' zero-centred values. Three layouts of the layers:

unscanned   ``layers_{i}``
scanned     what 0.2.5 makes with scan_layers=True: ``layers/layer_{j}`` stacked over blocks (Qwen3.5), or
            ``layers/local_layers`` stacked twice and ``layers/global_layer`` (Qwen3-Next)
blocks      ``layers/layer_{j}`` for both, as MaxText had it before 0.2.5
The stacks' axes come second (param_scan_axis=1).
"""

from __future__ import annotations

from pathlib import Path

from ...spec.errors import GdnError, bad
from ..families import Family
from ..layout import layout
from ..table import Dialect, Entry, entries

__all__ = ["LAYOUTS", "layout_of", "maxtext_dialect", "period_of"]

LAYOUTS = ("unscanned", "scanned", "blocks")
_FAMILIES = ("qwen3_next", "qwen3_5")
_ROOT = "params.params."

_LINEAR = {
    "attention.in_proj_qkvz.kernel": "E, Hk (q Dk | k Dk | v R Dv | z R Dv)",
    "attention.in_proj_ba.kernel": "E, Hk (b R | a R)",
    "attention.conv1d.kernel": "W, 1, (conv_q Hk Dk | conv_k Hk Dk | conv_v Hk R Dv)",
    "attention.A_log": "A_log: Hk R",
    "attention.dt_bias": "dt_bias: Hk R",
    "attention.norm.rms_norm.scale": "o_norm: Dv",
    "attention.out_proj.kernel": "out: Hk R Dv, E",
}
_FULL = {
    "attention.attention.query.kernel": "attn_q: E, H, A",
    "attention.attention.key.kernel": "attn_k: E, Hkv, D",
    "attention.attention.value.kernel": "attn_v: E, Hkv, D",
    "attention.attention.out.kernel": "attn_o: H D, E",
    "attention.attention.query_norm.scale": "attn_q_norm: n",
    "attention.attention.key_norm.scale": "attn_k_norm: n",
}
_BOTH = {
    "mlp.routed_experts.gate.kernel": "router: E, X",
    "mlp.routed_experts.wi_0": "expert_gate: @e, E, M",
    "mlp.routed_experts.wi_1": "expert_up: @e, E, M",
    "mlp.routed_experts.wo": "expert_down: @e, M, E",
    "mlp.shared_expert.wi_0.kernel": "shared_gate: E, S",
    "mlp.shared_expert.wi_1.kernel": "shared_up: E, S",
    "mlp.shared_expert.wo.kernel": "shared_down: S, E",
    "mlp.shared_expert_gate.kernel": "shared_switch: E, 1",
    "input_layernorm.scale": "norm_1: E",
    "post_attention_layernorm.scale": "norm_2: E",
}
_MODEL = {
    "decoder.decoder_norm.scale": "final_norm: E",
    "decoder.logits_dense.kernel": "head: E, V",
    "token_embedder.embedding": "embed: V, E",
}


def _scanned(text: str, axes: str) -> str:
    """The layout with stacking axes in second place."""
    piece, colon, rest = text.rpartition(":")
    first, *others = rest.split(",")
    return piece + colon + ",".join([first, " " + axes, *others])


def _stacked(table: dict[str, str], under: str, axes: str, period: int, places: tuple[int, ...]) -> tuple[Entry, ...]:
    return tuple(
        Entry(_ROOT + under + name, layout(_scanned(text, axes)), period=period, places=places)
        for name, text in table.items()
    )


def maxtext_dialect(family: Family, how: str, period: int | None) -> Dialect:
    """The tree of a family in one of ``LAYOUTS``; ``period`` layers make up a block of which the last is full
    attention.

    Raises:
        GdnError: MaxText has no such model, or its layers make up no such blocks.
    """
    if family.name not in _FAMILIES:
        raise bad("--to maxtext", f"asked for {family.title}", "be for Qwen3-Next or Qwen3.5 with experts")
    if how not in LAYOUTS:
        raise bad("--layout", repr(how), f"be one of {', '.join(LAYOUTS)}: MaxText's releases differ (see --like)")
    model = entries(_MODEL, _ROOT)
    if how == "unscanned":
        return Dialect("maxtext", (*model, *entries({**_LINEAR, **_FULL, **_BOTH}, _ROOT + "decoder.layers_{i}.")))
    if period is None:
        raise GdnError("the layers are no whole blocks that end with full attention; --layout must be unscanned.")
    last, before = period - 1, tuple(range(period - 1))
    rows: list[Entry] = []
    if how == "scanned" and family.name == "qwen3_next":
        rows += _stacked({**_LINEAR, **_BOTH}, "decoder.layers.local_layers.", "@g, @j", period, before)
        rows += _stacked({**_FULL, **_BOTH}, "decoder.layers.global_layer.", "@g", period, (last,))
    else:
        rows += _stacked({**_LINEAR, **_BOTH}, "decoder.layers.layer_{j}.", "@g", period, before)
        rows += _stacked({**_FULL, **_BOTH}, "decoder.layers.layer_{j}.", "@g", period, (last,))
    return Dialect("maxtext", (*model, *rows))


def period_of(linear: list[int], layers: int) -> int | None:
    """Layers of a block, if every block ends with its only layer of full attention; else None."""
    full = [n for n in range(layers) if n not in set(linear)]
    if not full or layers % (full[0] + 1):
        return None
    period = full[0] + 1
    return period if full == list(range(period - 1, layers, period)) else None


def layout_of(checkpoint: Path) -> str:
    """The layout of an existing MaxText checkpoint (its folder, a step's, or its items'), by its tree's names.

    Raises:
        GdnError: it is none, or of a layout that is not known here.
    """
    from ..reader import read_json

    for place in (checkpoint, checkpoint / "items", *sorted(checkpoint.glob("*/items"))):
        if (place / "_METADATA").is_file():
            names = str(list(read_json(place / "_METADATA").get("tree_metadata", {})))
            for mark, how in (("'local_layers'", "scanned"), ("'layer_0'", "blocks"), ("'layers_0'", "unscanned")):
                if mark in names:
                    return how
            raise bad("--like", f"{place}, whose layers have other names", "be a checkpoint of MaxText's Qwen3-Next")
    raise bad("--like", str(checkpoint), "be a folder with an Orbax checkpoint of MaxText")
