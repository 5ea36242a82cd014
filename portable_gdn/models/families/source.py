"""What a family's settings are made of: a port's facts, its configuration, the shapes of its leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...checkpoint.configuration import text_config, tied
from ...checkpoint.mixer_settings import mixer_settings
from ...spec.errors import GdnError, bad
from ..settings import DecoderSettings, MixerSettings

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A port, as far as its settings need it."""

    facts: Mapping[str, Any]
    """Its portable_gdn.json."""
    config: Mapping[str, Any]
    """The config.json of what it was made of."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of its leaves, by name."""

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the text model."""
        return text_config(self.config)

    def count(self, *keys: str) -> int:
        """A positive whole number of the configuration, under the first of its names that is there.

        Raises:
            GdnError: it is none.
        """
        value = self.get(*keys)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad(f"config.json's {keys[0]}", repr(value), "be a positive whole number")
        return value

    def number(self, key: str, value: Any) -> float:
        """A value of the configuration, which must be a positive number.

        Raises:
            GdnError: it is none.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise bad(f"config.json's {key}", repr(value), "be a positive number")
        return float(value)

    def get(self, *keys: str, default: Any = None) -> Any:
        """A setting under the first of its names that is there and not null."""
        return next((self.text[key] for key in keys if self.text.get(key) is not None), default)

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a setting of which only some values are computed here; absent and null are allowed.

        Raises:
            GdnError: it has another value.
        """
        value = self.text.get(key)
        if value is not None and value not in allowed:
            raise bad(f"config.json's {key}", repr(value), f"be {allowed[0]!r}: {why}")

    def linear(self) -> tuple[bool, ...]:
        """For each layer, whether its attention is linear.

        Raises:
            GdnError: the configuration says otherwise than the port.
        """
        found = tuple(i in self.facts["linear_layers"] for i in range(self.count("num_hidden_layers")))
        kinds = self.text.get("layer_types")
        if kinds is not None and tuple(kind == "linear_attention" for kind in kinds) != found:
            raise GdnError("config.json's layer_types are not those of the port's layers; they must say the same.")
        return found

    def size(self, name: str, axis: int) -> int:
        """A size of a leaf.

        Raises:
            GdnError: it is not in the port.
        """
        if name not in self.shapes or len(self.shapes[name]) <= axis:
            raise GdnError(f"{name} is not in the port; a whole model must have it.")
        return self.shapes[name][axis]

    def mlp_size(self, dense: tuple[bool, ...], which: bool, name: str, axis: int) -> int:
        """A size of the first layer whose MLP is dense, or a mixture; 0 where there is none."""
        return self.size(f"layers.{dense.index(which)}.mlp.{name}", axis) if which in dense else 0

    def mixer(self, linear: tuple[bool, ...]) -> MixerSettings | None:
        """What the linear layers compute, which is the same in all."""
        if not any(linear):
            return None
        mixer, at = self.facts["mixer"], f"layers.{linear.index(True)}.mixer."
        below = {name.removeprefix(at): shape for name, shape in self.shapes.items() if name.startswith(at)}
        return MixerSettings(kind=mixer["kind"], **mixer_settings(mixer, below))

    def decoder(self, dense: tuple[bool, ...], **own: Any) -> DecoderSettings:
        """The settings of the whole model: what leaves and configuration say of every family's, and its own.

        Args:
            dense: for each layer, whether its MLP is dense.
            own: what families differ in.
        """
        linear = self.linear()
        return DecoderSettings(
            vocabulary=self.size("embed.embedding", 0),
            hidden_size=self.size("embed.embedding", 1),
            linear=linear,
            dense=dense,
            intermediate_size=self.mlp_size(dense, True, "gate_proj.kernel", 1),
            tied=tied(self.config, False),
            mixer=self.mixer(linear),
            **own,
        )
