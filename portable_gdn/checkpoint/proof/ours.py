"""Our side of a proof: the port's layers in JAX, on the inputs that the original's layers had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..loading import load_layer
from .limits import LIMIT
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


def compare(port: Path, original: Original, backend: str) -> Iterator[tuple[int, str, float, float]]:
    """Layer, what was compared, its relative error, and what that must be below: prefill, the states after it, and the
    worst of the decoding steps.

    The limit is LIMIT, for what the layer itself rounds, and in addition how far our own layer's result moves where
    each of its inputs and weights is off by noise of relative size LIMIT: a layer whose state remembers long, or whose
    norm divides by little, carries roundings on. Roundings of float32 are a tenth of LIMIT and less.
    """
    for number, layer in original.layers.items():
        ours = _load(port, number, backend)
        # The kernels are for whole sequences.
        stepping = _load(port, number, "xla") if backend.startswith("pallas") else ours
        yield from ((number, *found) for found in _one(ours, stepping, layer))


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


def _one(ours: Any, stepping: Any, layer: Layer) -> Iterator[tuple[str, float, float]]:
    """What of one layer was compared, its relative error, and its limit."""
    random = np.random.default_rng(0)
    disturbed = lambda x: np.asarray(x * (1 + LIMIT * random.standard_normal(x.shape)), np.float32)  # noqa: E731
    run, step = _compiled()
    other = _with_weights(ours, disturbed)
    other_stepping = other if stepping is ours else _with_weights(stepping, lambda x: x, other)
    y, state = run(ours, layer.x)
    moved_y, moved = run(other, disturbed(layer.x))
    width = state.conv.shape[1]
    conv = layer.conv[:, layer.conv.shape[1] - width :]
    for what, got, want, far in (
        ("output", y, layer.y, moved_y),
        ("recurrent state", state.recurrent, layer.recurrent, moved.recurrent),
        ("convolution state", state.conv, conv, moved.conv),
    ):
        yield what, _error(got, want), _limit(far, got)
    worst, most = 0.0, LIMIT
    for x, want in zip(layer.later_x, layer.later_y, strict=True):
        y, state = step(stepping, x, state)
        moved_y, moved = step(other_stepping, disturbed(x), moved)
        worst, most = max(worst, _error(y, want)), max(most, _limit(moved_y, y))
    yield f"{len(layer.later_x)} decoding steps", worst, most


def _with_weights(layer: Any, change: Callable[[Any], np.ndarray], source: Any = None) -> Any:
    """A layer with the weights of another one (by default its own), each as ``change`` makes it."""
    import jax
    from flax import nnx

    graph, _, *rest = nnx.split(layer, nnx.Param, ...)
    weights = nnx.state(layer if source is None else source, nnx.Param)
    return nnx.merge(graph, jax.tree.map(lambda a: change(np.asarray(a)), weights), *rest)


def _limit(moved: Any, result: Any) -> float:
    """LIMIT for what the layer itself rounds, and in addition how far its result was moved, if that is finite."""
    far = _error(moved, np.asarray(result))
    return LIMIT + far if np.isfinite(far) else LIMIT


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
