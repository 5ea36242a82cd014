"""Another family's files as a target: the linear-attention layers, where both compute the same function of the same
weights.

What a family can express is compared first (``Limits``), so that a port never changes what a layer computes: its decay,
its output gate, its eps, how large beta may be. All other tensors have no place there and wait in the side file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...spec.errors import GdnError, bad
from ..families import Family, Mixer, family_named

__all__ = ["FAMILY_TARGETS", "family_target", "target_config"]


@dataclass(frozen=True)
class Limits:
    """What a family's layers can be, and its configuration for them."""

    kind: str
    gates: tuple[str | None, ...]
    config: Callable[[Mixer], dict[str, Any]]
    eps: float | None = None
    beta_scales: tuple[float, ...] = (1.0,)
    bounded: bool = False
    equal_heads: bool = False
    equal_dims: bool = False


def _linear(m: Mixer) -> dict[str, Any]:
    return {
        "linear_num_key_heads": m.num_heads,
        "linear_num_value_heads": m.num_value_heads,
        "linear_key_head_dim": m.key_dim,
        "linear_value_head_dim": m.value_dim,
    }


def _fla(m: Mixer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "head_dim": m.key_dim,
        "num_heads": m.num_heads,
        "num_v_heads": m.num_value_heads,
        "expand_v": m.value_dim / m.key_dim,
        "norm_eps": m.norm_eps,
        "allow_neg_eigval": m.beta_scale == 2.0,
    }
    if m.kind == "gdn":
        found.update(use_gate=m.gate is not None, output_gate_activation="swish" if m.gate == "silu" else m.gate)
    elif m.lower_bound is not None:
        found.update(safe_gate=True, lower_bound=m.lower_bound)
    return found


def _qwen(m: Mixer) -> dict[str, Any]:
    return {**_linear(m), "rms_norm_eps": m.norm_eps}


_LIMITS = {
    "qwen3_next": Limits("gdn", ("silu",), _qwen),
    "qwen3_5": Limits("gdn", ("silu",), _qwen),
    "olmo_hybrid": Limits(
        "gdn",
        ("silu",),
        lambda m: {**_linear(m), "linear_allow_neg_eigval": m.beta_scale == 2.0},
        eps=1e-5,
        beta_scales=(1.0, 2.0),
    ),
    "gated_deltanet": Limits("gdn", ("silu", "sigmoid", None), _fla, beta_scales=(1.0, 2.0)),
    "kimi_linear": Limits(
        "kda",
        ("sigmoid",),
        lambda m: {
            "linear_attn_config": {"num_heads": m.num_heads, "head_dim": m.key_dim},
            "rms_norm_eps": m.norm_eps,
        },
        equal_heads=True,
        equal_dims=True,
    ),
    "kda": Limits("kda", ("sigmoid",), _fla, beta_scales=(1.0, 2.0), bounded=True),
    "gated_deltanet2": Limits("gdn2", ("sigmoid",), _fla, beta_scales=(1.0, 2.0)),
}

FAMILY_TARGETS = ("hf", "fla", *_LIMITS)
_DEFAULT = {
    "hf": {"gdn": "qwen3_next", "kda": "kimi_linear"},
    "fla": {"gdn": "gated_deltanet", "kda": "kda", "gdn2": "gated_deltanet2"},
}


def family_target(to: str, source: Family, mixer: Mixer | None) -> Family:
    """The family that ``--to`` means for this source.

    Raises:
        GdnError: it cannot express what the source's layers compute.
    """
    if mixer is None:
        raise GdnError(
            f"config.json does not say what the layers of {source.title} compute; to port them to {to} it must."
        )
    name = _DEFAULT[to].get(mixer.kind) if to in _DEFAULT else to
    family = family_named(name) if name is not None else None
    if family is None or family.name not in _LIMITS:
        raise bad("--to", repr(to), f"be a family with {mixer.kind} layers")
    if family is not source:
        for what, was, must in _differences(_LIMITS[family.name], mixer):
            raise GdnError(f"{what} of the source's layers is {was}; to be ported to {family.title} it must be {must}.")
    return family


def _differences(limits: Limits, m: Mixer) -> list[tuple[str, object, object]]:
    one_of = lambda values: " or ".join(str(v) for v in values)  # noqa: E731
    found: list[tuple[str, object, object]] = []
    if m.kind != limits.kind:
        return [("the rule", m.kind, limits.kind)]
    if m.gate not in limits.gates:
        found.append(("the output gate", m.gate, one_of(limits.gates)))
    if limits.eps is not None and m.norm_eps != limits.eps:
        found.append(("the norm's eps", m.norm_eps, limits.eps))
    if m.beta_scale not in limits.beta_scales:
        found.append(("the largest beta", m.beta_scale, one_of(limits.beta_scales)))
    if m.lower_bound is not None and not limits.bounded:
        found.append(("the decay's lower bound", m.lower_bound, None))
    if limits.equal_heads and m.num_heads != m.num_value_heads:
        found.append(("the number of value heads", m.num_value_heads, m.num_heads))
    if limits.equal_dims and m.key_dim != m.value_dim:
        found.append(("the value head's width", m.value_dim, m.key_dim))
    return found


def target_config(family: Family, mixer: Mixer, sizes: Mapping[str, int], layers: list[int]) -> dict[str, Any]:
    """A config.json for the layers alone."""
    return {
        "model_type": family.model_types[0],
        "hidden_size": sizes["E"],
        **_LIMITS[family.name].config(mixer),
        "portable_gdn": {"only_linear_attention_layers": layers},
    }
