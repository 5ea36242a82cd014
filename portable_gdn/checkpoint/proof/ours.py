"""Our side of a proof: the port's layers in JAX, on the inputs that the original's layers had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..loading import load_layer
from .oracle import Layer, Original
from .text import PREFILLED

__all__ = ["compare", "compare_logits", "compare_whole"]


def _error(got: Any, want: np.ndarray) -> float:
    """Relative error in the L2 norm; infinite for other shapes or what is not finite."""
    got = np.asarray(got, np.float64)
    want = want.astype(np.float64)
    if got.shape != want.shape:
        return float("inf")
    size = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want))
    if not np.isfinite(error):
        return float("inf")
    return error / size if size else error


def compare(port: Path, original: Original, backend: str) -> Iterator[tuple[int, str, float]]:
    """Layer, what was compared, relative error: prefill, states after it, and the worst of the decoding steps."""
    for number, layer in original.layers.items():
        ours = _load(port, number, backend)
        # The kernels are for whole sequences.
        stepping = _load(port, number, "xla") if backend.startswith("pallas") else ours
        yield from ((number, what, error) for what, error in _one(ours, stepping, layer))


def _load(port: Path, number: int, backend: str) -> Any:
    import jax
    import jax.numpy as jnp

    return load_layer(
        port,
        number,
        dtype=jnp.float32,
        precision="highest",
        projection_precision=jax.lax.Precision.HIGHEST,
        backend=backend,
    )


@cache
def _compiled() -> tuple[Any, Any]:
    """Whole sequences and one token: compiled once for all layers that are alike."""
    from flax import nnx

    return nnx.jit(lambda layer, x: layer(x, output_final_state=True)), nnx.jit(lambda layer, x, s: layer.step(x, s))


def _one(ours: Any, stepping: Any, layer: Layer) -> Iterator[tuple[str, float]]:
    run, step = _compiled()
    y, state = run(ours, layer.x)
    yield "output", _error(y, layer.y)
    yield "recurrent state", _error(state.recurrent, layer.recurrent)
    width = state.conv.shape[1]
    yield "convolution state", _error(state.conv, layer.conv[:, layer.conv.shape[1] - width :])
    worst = 0.0
    for x, want in zip(layer.later_x, layer.later_y, strict=True):
        y, state = step(stepping, x, state)
        worst = max(worst, _error(y, want))
    yield f"{len(layer.later_x)} decoding steps", worst


def compare_logits(port: Path, original: Original, backend: str) -> float:
    """The whole model with our layers in place of its own: relative error of its logits."""
    assert original.logits_with is not None
    assert original.logits is not None
    run, _ = _compiled()

    def forward(number: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: np.asarray(run(_load(port, number, backend), x)[0])  # one layer in memory at a time

    return _error(original.logits_with({number: forward(number) for number in original.layers}), original.logits)


def compare_whole(logits: np.ndarray, original: Original) -> Iterator[tuple[str, float, float]]:
    """What of a whole model was compared, its relative error, and what that must be below: as much as the original's
    own logits move where each of its projections, norms and mixers is off by as much as a layer may be.

    Args:
        logits: [1, T + D, vocabulary] of our model: T tokens at once, then one by one.
    """
    assert original.logits is not None
    assert original.disturbed is not None
    want, T = original.logits, PREFILLED
    if logits.shape != want.shape:
        yield "our whole model", float("inf"), 0.0
        return
    rows = [row[None] for row in original.disturbed]
    yield "our whole model", _error(logits[:, :T], want[:, :T]), max(_error(row[:, :T], want[:, :T]) for row in rows)
    later = range(T, want.shape[1])
    worst = lambda found: max(_error(found[:, t], want[:, t]) for t in later)  # noqa: E731
    yield f"our whole model, {len(later)} steps", worst(logits), max(map(worst, rows))
