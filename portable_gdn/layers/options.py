"""The options that all layers share, and the checks of a constructor's keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, Required, TypedDict

from ..spec.errors import GdnError, bad, check_keywords

__all__ = ["LayerOptions", "checked_options"]

P = ParamSpec("P")


class LayerOptions(TypedDict, total=False):
    """Keywords of every layer."""

    num_heads: Required[int]
    """H, the key heads."""
    num_value_heads: int | None
    """HV, a multiple of H; H if None."""
    key_dim: Required[int]
    """K, the width of a key head."""
    value_dim: int | None
    """V, the width of a value head; K if None."""
    conv_size: int
    """W, the taps of the short convolution: 4. 0 is no convolution, and silu alone."""
    conv_bias: bool
    """Whether the convolutions have biases: False."""
    beta_scale: float
    """2 lets the transition have negative eigenvalues: 1."""
    dtype: Any
    """The dtype of the computation; None is that of input and weights."""
    param_dtype: Any
    """The dtype of the weights: float32. A_log and dt_bias are float32 always."""
    norm_dtype: Any
    """The dtype of the output norm's scale: float32."""
    projection_precision: Any
    """The precision of the projections' products (``jax.lax.Precision``); None rounds float32 to bfloat16 on a TPU."""
    precision: str | None
    """As in ``gated_delta_rule``."""
    backend: str | None
    """As in ``gated_delta_rule``."""
    sharding: Any
    """As in ``gated_delta_rule``: a ``portable_gdn.Sharding``, or None."""


def checked_options(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a layer's constructor to refuse keywords that are unknown, missing or of a wrong size, in one sentence.

    Its keywords are its own and those of ``LayerOptions``, which it takes as ``options``.
    """
    layer = init.__qualname__.split(".")[0]
    own = {name: p for name, p in signature(init).parameters.items() if name not in ("self", "options")}
    known = (*own, *LayerOptions.__annotations__)
    needed = [name for name, p in own.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    needed += ["num_heads", "key_dim"]  # those that are Required above, which Python cannot tell of names in strings

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        check_keywords(layer, options, known)
        for name in needed:
            if name not in options:
                raise GdnError(f"{layer} is called without {name}; it must be given.")
        _check_sizes(options)
        init(*args, **options)

    return checked


def _check_sizes(options: Mapping[str, Any]) -> None:
    for name in ("num_heads", "num_value_heads", "key_dim", "value_dim"):
        size = options.get(name)
        optional = name in ("num_value_heads", "value_dim")
        if not (optional and size is None) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise bad(name, repr(size), f"be {'None or ' if optional else ''}a positive integer")
    width = options.get("conv_size", 4)
    if isinstance(width, bool) or not isinstance(width, int) or width < 0:
        raise bad("conv_size", repr(width), "be an integer, 0 for no convolution")
