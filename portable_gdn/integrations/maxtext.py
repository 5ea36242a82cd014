"""MaxText's Qwen3-Next and Qwen3.5 on our call.

Their layers call one function of ``maxtext.models.qwen3`` for whole sequences, inside MaxText's own ``shard_map``, with
queries and keys repeated for the value heads. It is replaced here; the step that decoding takes is left.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ..spec.errors import GdnError
from .patch import Patch

__all__ = ["patch_maxtext"]

Array = Any

_MODULE = "maxtext.models.qwen3"
_RULE = "jax_chunk_gated_delta_rule"
# Parameters of MaxText's function, by its own names.
_OPERANDS = tuple("query key value g beta chunk_size initial_state use_qk_norm_in_gdn".split())  # noqa: SIM905
_OPTIONS = ("cp_axis", "compute_dtype")


def patch_maxtext(*, backend: str | None = None, precision: str | None = None) -> Patch:
    """Make MaxText's Qwen3-Next and Qwen3.5 use ``gated_delta_rule`` for whole sequences, in training and in prefill.

    Works until undone, for what is traced meanwhile: a program that was compiled before keeps MaxText's own function,
    and one that was compiled with ours keeps ours:

        patch = patch_maxtext(); ...; patch.undo()

    Where a sequence is split over devices (MaxText's ``cp_axis``), its own function computes as before. ``chunk_size``
    and ``compute_dtype`` are not looked at: chunks are ours, and operands keep the dtype that they come in.

    Args:
        backend, precision: of every call; None as in ``gated_delta_rule``.

    Returns:
        The patch, a context manager with ``undo``.

    Raises:
        GdnError: MaxText is not installed, or its function has other parameters than release 0.2.5's.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise GdnError(
            f"{_MODULE} cannot be imported, since {error.name} is not there; MaxText must be installed, release 0.2.5."
        ) from error
    original = getattr(module, _RULE, None)
    names = list(inspect.signature(original).parameters) if callable(original) else []
    if set(_OPERANDS) - set(names) or set(names) - {*_OPERANDS, *_OPTIONS}:
        what = f"takes {', '.join(names)}" if names else "is not there"
        raise GdnError(
            f"{_RULE} of {_MODULE} {what}; it must take {', '.join((*_OPERANDS, *_OPTIONS))}, as in MaxText 0.2.5."
        )
    patch = Patch()
    patch._replace(module, _RULE, lambda before: _rule(before, backend, precision))
    return patch


def _rule(original: Callable[..., Any], backend: str | None, precision: str | None) -> Callable[..., Any]:
    """Ours with the parameters of MaxText's."""
    from ..api import gated_delta_rule

    signature = inspect.signature(original)

    @functools.wraps(original)
    def rule(*args: Any, **options: Any) -> tuple[Array, Array | None]:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        x = given.arguments
        if x.get("cp_axis"):
            return original(*args, **options)
        state = x["initial_state"]
        return gated_delta_rule(
            x["query"],
            x["key"],
            x["value"],
            x["g"].astype("float32"),
            beta=x["beta"].astype("float32"),
            initial_state=None if state is None else state.astype("float32"),
            output_final_state=state is not None,
            qk_l2norm=bool(x["use_qk_norm_in_gdn"]),
            precision=precision,
            backend=backend,
        )

    return rule
