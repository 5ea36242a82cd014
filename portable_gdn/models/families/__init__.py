"""The settings of a family's decoder, from the configuration that a port carries and what its leaves say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...checkpoint.configuration import check_config
from ...checkpoint.families import family_named
from ...spec.errors import GdnError
from ..settings import DecoderSettings
from .fla import fla
from .kimi import kimi
from .olmo import olmo
from .qwen import qwen
from .source import Source

__all__ = ["FAMILIES", "settings_of"]

FAMILIES: dict[str, Callable[[Source], DecoderSettings]] = {
    "qwen3_next": qwen,
    "qwen3_5": qwen,
    "kimi_linear": kimi,
    "olmo_hybrid": olmo,
    "gated_deltanet": fla,
    "kda": fla,
    "gated_deltanet2": fla,
}
"""What makes the settings of each family that has a decoder here, by its name in a port."""


def settings_of(
    facts: Mapping[str, Any], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> DecoderSettings:
    """The settings of a port.

    Args:
        facts: its portable_gdn.json.
        config: its source's config.json.
        shapes: of its leaves, by name.

    Raises:
        GdnError: there is no configuration, it lacks or contradicts something, or the family has no decoder here.
    """
    name = facts["family"]
    make = FAMILIES.get(name)
    if make is None:
        known = [_title(known) for known in FAMILIES]
        raise GdnError(
            f"the port is of {_title(name)}, of which no whole model is computed here; it must be of "
            f"{', '.join(known[:-1])} or {known[-1]}. load_layer gives its linear-attention layers, load_tree its "
            f"weights."
        )
    if not config:
        raise GdnError("the port has no config.json of its source, which says how the model computes; it must.")
    check_config(config)
    if facts["mixer"] is None:
        raise GdnError("the port does not know what its layers compute; its source's config.json must say it.")
    return make(Source(facts, config, shapes))


def _title(name: str) -> str:
    family = family_named(name)
    return name if family is None else family.title
