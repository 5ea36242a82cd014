"""The settings of a family's decoder, from the configuration that a port carries and what its leaves say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint.configuration import check_config, text_config, tied
from ..checkpoint.families import family_named
from ..spec.errors import GdnError, bad
from .settings import AttentionSettings, DecoderSettings, ExpertSettings, MixerSettings

__all__ = ["settings_of"]

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def settings_of(facts: Mapping[str, Any], config: Config, shapes: Shapes) -> DecoderSettings:
    """The settings of a port.

    Args:
        facts: its portable_gdn.json.
        config: its source's config.json.
        shapes: of its leaves, by name.

    Raises:
        GdnError: there is no configuration, it lacks or contradicts something, or the family has no decoder here.
    """
    name = facts["family"]
    make = _FAMILIES.get(name)
    if make is None:
        family = family_named(name)
        known = " and ".join(_title(known) for known in _FAMILIES)
        raise GdnError(
            f"the port is of {name if family is None else family.title}, of which no whole model is computed here; it "
            f"must be of {known}. load_layer gives its linear-attention layers, load_tree its weights."
        )
    if not config:
        raise GdnError("the port has no config.json of its source, which says how the model computes; it must.")
    check_config(config)
    if facts["mixer"] is None:
        raise GdnError("the port does not know what its layers compute; its source's config.json must say it.")
    return make(facts, config, shapes)


def _title(name: str) -> str:
    family = family_named(name)
    return name if family is None else family.title


def _qwen(facts: Mapping[str, Any], config: Config, shapes: Shapes) -> DecoderSettings:
    text = text_config(config)
    layers = _said(text, "num_hidden_layers")
    linear = tuple(i in facts["linear_layers"] for i in range(layers))
    dense = tuple(_is_dense(text, i) for i in range(layers))
    kinds = text.get("layer_types")
    told = tuple(kind == "linear_attention" for kind in kinds) if kinds is not None else linear
    if told != linear:
        raise GdnError("config.json's layer_types are not those of the port's layers; they must say the same.")
    if text.get("hidden_act") not in (None, "silu", "swish"):
        raise bad("config.json's hidden_act", repr(text["hidden_act"]), "be 'silu'")
    if text.get("attention_bias"):
        raise bad("config.json's attention_bias", "true", "be false: no biases are known of these families")
    return DecoderSettings(
        vocabulary=_size(shapes, "embed.embedding", 0),
        hidden_size=_size(shapes, "embed.embedding", 1),
        linear=linear,
        dense=dense,
        intermediate_size=_first_size(shapes, dense, True, "gate_proj.kernel", 1),
        norm_eps=text.get("rms_norm_eps", 1e-6),
        zero_centred=True,
        tied=tied(config, False),
        mixer=_mixer(facts, shapes, linear),
        attention=None if all(linear) else _qwen_attention(text),
        experts=None if all(dense) else _qwen_experts(facts, text, shapes, dense),
    )


def _is_dense(text: Config, number: int) -> bool:
    every = text.get("decoder_sparse_step", 1)
    experts = number not in (text.get("mlp_only_layers") or ()) and (number + 1) % every == 0
    return not (text.get("num_experts") and experts)


def _qwen_attention(text: Config) -> AttentionSettings:
    heads = _said(text, "num_attention_heads")
    dim = text.get("head_dim") or _said(text, "hidden_size") // heads
    rope = _rope(text)
    channels = int(dim * rope["partial_rotary_factor"])
    if channels % 2 or not 0 < channels <= dim:
        raise bad("config.json's partial_rotary_factor", rope["partial_rotary_factor"], f"make an even part of {dim}")
    return AttentionSettings(heads, text.get("num_key_value_heads") or heads, dim, channels, rope["rope_theta"])


def _rope(text: Config) -> dict[str, float]:
    """Theta and the part of a head that is rotated, where old and new files have them."""
    said = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "mrope"):  # of text alone, the three positions of mrope are one
        raise bad(
            "config.json's rope_type", repr(kind), "be 'default': positions that are scaled are not computed here"
        )
    said.setdefault("partial_rotary_factor", 0.25)
    for key in ("rope_theta", "partial_rotary_factor"):
        value = said.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise bad(f"config.json's {key}", repr(value), "be a positive number")
    return {key: float(said[key]) for key in ("rope_theta", "partial_rotary_factor")}


def _qwen_experts(facts: Mapping[str, Any], text: Config, shapes: Shapes, dense: tuple[bool, ...]) -> ExpertSettings:
    count, chosen = _said(text, "num_experts"), _said(text, "num_experts_per_tok")
    if chosen > count:
        raise bad("config.json's num_experts_per_tok", chosen, f"be at most num_experts = {count}")
    # Qwen3.5 has no such switch: transformers always divides, whatever a file says.
    renormalised = facts["family"] != "qwen3_next" or text.get("norm_topk_prob", True) is not False
    return ExpertSettings(
        count,
        chosen,
        _first_size(shapes, dense, False, "experts.gate_proj", 2),
        _first_size(shapes, dense, False, "shared_expert.gate_proj.kernel", 1),
        renormalised,
    )


def _mixer(facts: Mapping[str, Any], shapes: Shapes, linear: tuple[bool, ...]) -> MixerSettings | None:
    if not any(linear):
        return None
    mixer, at = facts["mixer"], f"layers.{linear.index(True)}.mixer."
    names = ("kind", "num_heads", "num_value_heads", "key_dim", "value_dim", "gate", "norm_eps", "beta_scale")
    conv = shapes.get(at + "q_conv1d.kernel")
    return MixerSettings(
        **{name: mixer[name] for name in names},
        conv_size=conv[0] if conv else 0,
        conv_bias=at + "q_conv1d.bias" in shapes,
    )


def _said(text: Config, key: str) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad(f"config.json's {key}", repr(value), "be a positive whole number")
    return value


def _size(shapes: Shapes, name: str, axis: int) -> int:
    if name not in shapes or len(shapes[name]) <= axis:
        raise GdnError(f"{name} is not in the port; a whole model must have it.")
    return shapes[name][axis]


def _first_size(shapes: Shapes, dense: tuple[bool, ...], which: bool, name: str, axis: int) -> int:
    """A size of the first layer whose MLP is dense, or a mixture; 0 where there is none."""
    return _size(shapes, f"layers.{dense.index(which)}.mlp.{name}", axis) if which in dense else 0


_FAMILIES: dict[str, Callable[[Mapping[str, Any], Config, Shapes], DecoderSettings]] = {
    "qwen3_next": _qwen,
    "qwen3_5": _qwen,
}
