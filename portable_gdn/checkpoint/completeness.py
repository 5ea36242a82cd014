"""Compare the tensors of a checkpoint with those that its family and configuration require: what is missing or too
much.

A layer needs the pieces that its family's table lists for its kind of layer, except those that the configuration makes
optional (``Family.may_lack``): biases, a convolution or an output gate that is turned off, a low-rank query. Layers are
numbered from 0 to num_hidden_layers - 1, and experts from 0 to the number of the router's outputs minus 1. Every model
has an embedding, a last norm and a head (unless the head is the embedding). Two kinds of checkpoint hold only
linear-attention layers: a port to another family's format (its config.json says so), and a single layer of
flash-linear-attention.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.errors import GdnError
from .configuration import text_config, tied
from .families import Family, Rule
from .families.family import MIXER_PIECES
from .table import Dialect, Entry, Key, Place

__all__ = [
    "Kinds",
    "absent",
    "attention_of_fla",
    "layer_kinds",
    "only_linear",
    "parts_lacking",
    "refuse_incomplete",
    "split_off_later_layers",
    "told_kinds",
    "uneven",
    "without_head",
]

_LINEAR, _FULL, _DENSE, _EXPERTS, _EVERY, _MODEL = "linear", "full", "dense", "experts", "every", "model"
_TOGETHER = (
    frozenset(("conv_q", "conv_k", "conv_v")),
    frozenset(("conv_q_bias", "conv_k_bias", "conv_v_bias")),
    frozenset(("attn_q_bias", "attn_k_bias", "attn_v_bias")),
    frozenset(("attn_q_norm", "attn_k_norm")),
)
"""Pieces of which a layer has all or none."""
_FULL_KINDS = ("full_attention", "sliding_attention", "indexed_attention", "chunked_attention", "attention")
_LOW_RANK_QUERY = frozenset(("mla_q_a", "mla_q_norm", "mla_q_b"))
_PREDICTS = re.compile(r"model\.layers\.\d+\.(eh_proj|enorm|hnorm|shared_head|final_layernorm|embed_tokens)\b.*")
"""Tensors that only a layer for multi-token prediction has."""
_NAMED = 6  # the most names that a sentence lists


@dataclass(frozen=True)
class Kinds:
    """Which layers have linear attention; ``count`` is the number of layers, by the configuration or else by the
    tensors.
    """

    linear: frozenset[int]
    count: int


def _group(piece: str) -> str:
    if piece in MIXER_PIECES:
        return _LINEAR
    if piece.startswith(("attn_", "mla_")):
        return _FULL
    if piece.startswith("mlp_"):
        return _DENSE
    if piece.startswith(("expert_", "router", "shared_")):
        return _EXPERTS
    return _EVERY if "norm" in piece and piece != "final_norm" else _MODEL


def only_linear(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layers that a port to another family's format holds; None if the checkpoint is not such a port."""
    ours = config.get("portable_gdn")
    layers = ours.get("only_linear_attention_layers") if isinstance(ours, Mapping) else None
    if not isinstance(layers, list) or not all(isinstance(n, int) and n >= 0 for n in layers):
        return None
    return layers


def told_kinds(config: Mapping[str, Any]) -> tuple[dict[int, bool], str]:
    """Return whether each layer has linear attention, as far as the configuration says, and the name of the setting."""
    config = text_config(config)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        known = {kind: kind == "linear_attention" for kind in (*_FULL_KINDS, "linear_attention")}
        return {n: known[kind] for n, kind in enumerate(kinds) if kind in known}, "layer_types"
    inner = config.get("linear_attn_config")
    if isinstance(inner, Mapping) and isinstance(inner.get("kda_layers"), list):
        found = {n - 1: True for n in inner["kda_layers"]}  # kda_layers counts from 1
        found.update({n - 1: False for n in inner.get("full_attn_layers") or ()})
        return found, "linear_attn_config"
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return {}, ""
    full = attention_of_fla(config)
    if full is not None:
        return {n: n not in full for n in range(count)}, "attn"
    for key in ("full_attention_interval", "layer_group_size"):
        step = config.get(key)
        if isinstance(step, int) and step > 0:
            # programs disagree about the layers after the last full group, so these are left open
            rest = count % step if key == "layer_group_size" else 0
            return {n: bool((n + 1) % step) for n in range(count - rest)}, key
    return {}, ""


def attention_of_fla(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]] | None:
    """Return the settings of flash-linear-attention's full-attention layers by layer, or None if there are none."""
    attention = config.get("attn")
    if isinstance(attention, Mapping):
        attention = [attention]
    if not isinstance(attention, list):
        return None
    return {n: part for part in attention if isinstance(part, Mapping) for n in part.get("layers") or ()}


def layer_kinds(family: Family, dialect: Dialect, names: Iterable[str], config: Mapping[str, Any]) -> Kinds:
    """Determine which layers have linear attention: by tensors that only one kind of layer has, or else by the
    configuration.

    Raises:
        GdnError: A layer has tensors of both kinds, or of a kind that contradicts the configuration.
    """
    proof: dict[int, dict[str, str]] = {}
    last = -1
    for name in names:
        rows, numbers = dialect.rows(name.removesuffix("_scale_inv"))
        rows = tuple(row for row in rows if "{i}" in row.name)
        if not rows or not numbers:
            continue
        last = max(last, numbers[0])
        groups = {_group(piece) for row in rows for piece in row.layout.pieces}
        if len(groups) == 1:
            proof.setdefault(numbers[0], {}).setdefault(groups.pop(), name)
    told, setting = told_kinds(config)
    said = text_config(config).get("num_hidden_layers")
    count = said if isinstance(said, int) else last + 1
    linear = set()
    for layer in range(count):
        found = proof.get(layer, {})
        if _LINEAR in found and _FULL in found:
            raise GdnError(
                f"layer {layer} has {found[_LINEAR]}, of linear attention, and {found[_FULL]}, of full attention; a "
                f"layer must have one of the two."
            )
        wrong = found.get(_FULL if told.get(layer) else _LINEAR)
        if layer in told and wrong is not None:
            kinds = ("linear", "full") if told[layer] else ("full", "linear")
            raise GdnError(
                f"config.json's {setting} says that layer {layer} has {kinds[0]} attention, and {wrong} is of "
                f"{kinds[1]} attention; configuration and tensors must agree."
            )
        if _LINEAR in found or (_FULL not in found and told.get(layer)):
            linear.add(layer)
    return Kinds(frozenset(linear), count)


def split_off_later_layers(dialect: Dialect, names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return the tensors of layers after the last one, which serve multi-token prediction.

    Raises:
        GdnError: There are such layers, but their tensors do not show that they serve multi-token prediction.
    """
    count = text_config(config).get("num_hidden_layers")
    if not isinstance(count, int):
        return []
    later: dict[int, list[str]] = {}
    predicts = set()
    for name in names:
        normal = dialect.normal(name)
        number = re.match(r"model\.layers\.(\d+)\.", normal)
        if number and int(number[1]) >= count:
            later.setdefault(int(number[1]), []).append(name)
            if _PREDICTS.fullmatch(normal):
                predicts.add(int(number[1]))
    odd = sorted(later.keys() - predicts)
    if odd:
        raise GdnError(
            f"config.json's num_hidden_layers is {count}, and the files hold layer{'s' if len(odd) > 1 else ''} "
            f"{', '.join(map(str, odd[:_NAMED]))} too ({later[odd[0]][0]}), which "
            f"{'are' if len(odd) > 1 else 'is'} not for multi-token prediction; configuration and tensors must agree."
        )
    return [name for group in later.values() for name in group]


def _feed_forward(family: Family, config: Mapping[str, Any], layer: int) -> tuple[str | None, str]:
    """Return "dense" or "experts" if the configuration determines it, and the setting that does."""
    config = text_config(config)
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return (_DENSE if kinds[layer] == "dense" else _EXPERTS), "mlp_layer_types"
    first = config.get("first_k_dense_replace")
    if isinstance(first, int) and config.get("moe_layer_freq") in (None, 1):
        return (_DENSE if layer < first else _EXPERTS), "first_k_dense_replace"
    if layer in (config.get("mlp_only_layers") or ()):
        return _DENSE, "mlp_only_layers"
    return None, ""


def _experts(config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    config = text_config(config)
    said = (config.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    return sizes.get("X") or next((n for n in said if isinstance(n, int)), 0)


class _Rows:
    """A family's table rows by piece: those of layers, of a single layer outside a model, and of the model itself."""

    def __init__(self, dialect: Dialect, places: Mapping[Key, Place], bare: bool) -> None:
        self._dialect, self._bare = dialect, bare
        self._used: dict[str, Entry] = {}  # the row that this checkpoint uses, where the dialect has several
        for key, place in places.items():
            self._used.setdefault(key.piece, place.bound.entry)

    def of(self, group: str, linear: bool | None = None) -> set[str]:
        when = None if linear is None else _LINEAR if linear else _FULL
        return {
            piece
            for entry in self._dialect.entries
            if self._bare == (entry.layer >= 0) or group == _MODEL
            if entry.when in (None, when) or when is None
            for piece in entry.layout.pieces
            if _group(piece) == group
        }

    def name(self, key: Key, linear: bool) -> str:
        rows = [
            entry
            for entry in self._dialect.by_piece.get(key.piece, ())
            if self._bare == (entry.layer >= 0) or key.layer < 0
            if entry.when in (None, _LINEAR if linear else _FULL)
        ]
        used = self._used.get(key.piece)
        entry = used if used is not None and used.name in {row.name for row in rows} else rows[0]
        return self._dialect.actual(entry.name.format(i=key.layer, e=max(key.expert, 0)))


def absent(
    family: Family,
    dialect: Dialect,
    config: Mapping[str, Any],
    places: Mapping[Key, Place],
    sizes: Mapping[str, int],
    kinds: Kinds,
    alone: Sequence[int] | None = None,
    headless: bool = False,
) -> list[str]:
    """List what is required and missing, as names of tensors or as "layer 2 (all of it)".

    Args:
        family: The family of the model.
        dialect: The family's table, with the names of this checkpoint.
        config: The contents of config.json.
        places: The place of each piece that was found.
        sizes: The sizes of all dims.
        kinds: Which layers have linear attention.
        alone: The only layers required, and only their linear attention; None requires a whole model.
        headless: Whether the model may lack its head; see ``without_head``.

    Raises:
        GdnError: A tensor is present that the configuration rules out.
    """
    bare = any(place.bound.entry.layer >= 0 for place in places.values())
    rows = _Rows(dialect, places, bare)
    have: dict[int, set[str]] = {}
    experts: dict[int, dict[int, set[str]]] = {}
    for key in places:
        if key.expert >= 0:
            experts.setdefault(key.layer, {}).setdefault(key.expert, set()).add(key.piece)
        have.setdefault(key.layer, set()).add(key.piece)
    out = family.ruled_out(config)
    for key, place in places.items():
        if key.piece in out:
            raise GdnError(
                f"config.json says {out[key.piece]}, and {place.bound.name} is there; configuration and tensors must "
                f"agree."
            )
    if bare or alone is not None:
        found = []
        for layer in [0] if bare else alone or []:
            needed = _gate(rows.of(_LINEAR, True), have.get(layer, set())) - set(out)
            lacking = needed - _may_lack(family, config, layer, True, have.get(layer, set())) - have.get(layer, set())
            found += [rows.name(Key(piece, layer), True) for piece in sorted(lacking)]
        return list(dict.fromkeys(found))
    found = []
    lacks = family.may_lack(config, -1, False)
    for piece in sorted(rows.of(_MODEL) - lacks - have.get(-1, set())):
        if piece != "head" or not (headless or tied(config, family.tied)):
            found.append(rows.name(Key(piece), False))
    for layer in range(kinds.count):
        found += _layer(family, config, rows, layer, layer in kinds.linear, have.get(layer, set()), experts, sizes)
    return list(dict.fromkeys(found))


def _may_lack(family: Family, config: Mapping[str, Any], layer: int, linear: bool, have: Collection[str]) -> set[str]:
    """Return the pieces that this layer may lack; of pieces that belong together, it must have all or none."""
    lacks = set(family.may_lack(config, layer, linear))
    for group in _TOGETHER:
        if not group.isdisjoint(have):
            lacks -= group
    return lacks


def _layer(
    family: Family,
    config: Mapping[str, Any],
    rows: _Rows,
    layer: int,
    linear: bool,
    have: set[str],
    experts: Mapping[int, Mapping[int, set[str]]],
    sizes: Mapping[str, int],
) -> list[str]:
    if not have:
        return [f"layer {layer} (all of it)"]
    needed = _gate(rows.of(_LINEAR, True), have) if linear else _query(config, rows.of(_FULL, False), have)
    needed |= rows.of(_EVERY)
    dense, sparse = rows.of(_DENSE), rows.of(_EXPERTS)
    kind, setting = _feed_forward(family, config, layer)
    shows = {_DENSE: not dense.isdisjoint(have), _EXPERTS: not sparse.isdisjoint(have)}
    if all(shows.values()) and not dense & sparse:
        raise GdnError(f"layer {layer} has a dense feed-forward and experts; it must have one of the two.")
    shown = next((group for group, seen in shows.items() if seen), None)
    if kind is not None and shown is not None and kind != shown:
        raise GdnError(
            f"config.json's {setting} says that the feed-forward of layer {layer} is of kind {kind}, and the files "
            f"hold one of kind {shown}; configuration and tensors must agree."
        )
    if kind is None:
        kind = shown or (_EXPERTS if sparse and _experts(config, sizes) else _DENSE)
    text = text_config(config)
    if kind == _DENSE:
        needed |= dense
    else:
        needed |= sparse
        if 0 in (text.get(k) for k in ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")):
            needed -= {piece for piece in sparse if piece.startswith("shared_")}
    needed -= _may_lack(family, config, layer, linear, have) | family.ruled_out(config).keys()
    each = {piece for piece in needed if piece.startswith("expert_")}
    found = [rows.name(Key(piece, layer), linear) for piece in sorted(needed - have - each)]
    if kind == _EXPERTS:
        own = experts.get(layer, {})
        for e in range(_experts(config, sizes)):
            found += [rows.name(Key(piece, layer, e), linear) for piece in sorted(each - own.get(e, set()))]
        odd = sorted(e for e in own if e >= _experts(config, sizes))
        if odd:
            raise GdnError(
                f"layer {layer} has an expert {odd[0]}, and its router and config.json speak of "
                f"{_experts(config, sizes)}; they must agree."
            )
    return found


def _query(config: Mapping[str, Any], pieces: set[str], have: Collection[str]) -> set[str]:
    """Return the pieces of full attention, with the query as one projection or as two low-rank ones."""
    if "mla_q" not in pieces or "mla_q_a" not in pieces:
        return pieces
    text = text_config(config)
    low = text["q_lora_rank"] is not None if "q_lora_rank" in text else not _LOW_RANK_QUERY.isdisjoint(have)
    return pieces - ({"mla_q"} if low else _LOW_RANK_QUERY)


def _gate(pieces: set[str], have: Collection[str]) -> set[str]:
    """Return the pieces of linear attention, with the output gate as one projection or as two low-rank ones."""
    low = {"g_a", "g_b"}
    if "z" not in pieces or not low & pieces:
        return pieces
    return pieces - ({"z"} if not low.isdisjoint(have) else low)


def without_head(prefix: str, config: Mapping[str, Any]) -> bool:
    """Whether this is a model without a head, as transformers saves one: its names have no prefix, or its class says
    so.
    """
    kinds = config.get("architectures")
    if prefix == "":
        return True
    return bool(kinds) and not any(re.search(r"(For[A-Z]\w+|LMHeadModel)$", str(kind)) for kind in kinds or ())


def uneven(names: Iterable[str], count: int | None = None) -> list[str]:
    """List tensors that some of the numbered parts (layers, blocks) lack and others have, among those that a rule
    copies.

    Args:
        names: Names of the tensors that the rule copies unchanged.
        count: If given, all parts with smaller numbers must have the same tensors; None compares the parts that have
            any.
    """
    parts: dict[tuple[str, int], dict[str, str]] = {}
    for name in names:
        found = re.match(r"(.*?\b(?:layers|blocks)\.)(\d+)(\..*)", name)
        if found:
            parts.setdefault((found[1], int(found[2])), {})[found[3]] = name
    lacking = []
    for start in dict.fromkeys(start for start, _ in parts):
        own = {n: rests for (s, n), rests in parts.items() if s == start}
        whole = dict.fromkeys(rest for rests in own.values() for rest in rests)
        numbers = sorted(own) if count is None else range(count)
        lacking += [f"{start}{n}{rest}" for n in numbers for rest in whole if rest not in own.get(n, {})]
    return lacking


def parts_lacking(rule: Rule, dialect: Dialect, names: Iterable[str]) -> list[str]:
    """List missing tensors of modules that a rule copies and that must be complete (``Rule.whole``)."""
    have = {dialect.normal(name): name for name in names}
    lacking = []
    for start, rests in rule.whole:
        stems = dict.fromkeys(found[0] for found in (re.match(start, name) for name in have) if found)
        lacking += [dialect.actual(stem + rest) for stem in stems for rest in rests if stem + rest not in have]
    return lacking


def refuse_incomplete(where: str, title: str, lacking: Sequence[str], hint: str = "") -> None:
    """Raise an error if ``lacking`` is not empty.

    Args:
        where: The checkpoint, for the message.
        title: The family's title, for the message.
        lacking: What is missing, as ``absent`` gives it.
        hint: A further sentence for the message, beginning with a space; or "".

    Raises:
        GdnError: Something is missing; the message lists it.
    """
    if not lacking:
        return
    some = ", ".join(lacking[:_NAMED])
    more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    verb = "is" if len(lacking) == 1 else "are"
    raise GdnError(
        f"{where} is not complete: {some}{more} {verb} not there and must be, by the configuration and what a model "
        f"of {title} has.{hint}"
    )
