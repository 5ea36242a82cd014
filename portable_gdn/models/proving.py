"""Our side of the proof of a whole model: logits of a text, the first tokens at once and the rest one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..checkpoint.loading import load_stacks
from ..spec.errors import GdnError
from .blocks import Norm
from .decoder import DecoderLayer
from .loading import check_leaves, load_model, read_settings
from .numerics import Numerics
from .settings import DecoderSettings

__all__ = ["whole_logits"]

Array = Any
HIGHEST = jax.lax.Precision.HIGHEST


def whole_logits(port: Path, ids: np.ndarray, prefilled: int, backend: str, at_once: bool) -> np.ndarray:
    """The logits [1, T, V] of a port's whole model in float32, where nothing is rounded.

    Args:
        port: what ``portable-gdn port --to jax`` wrote.
        ids: [1, T].
        prefilled: how many tokens run at once, before the others follow one by one.
        backend: of the linear-attention layers, where several tokens run at once.
        at_once: whether the model fits into memory; else one layer at a time is there, with all tokens.

    Raises:
        GdnError: the port is of a family that has no decoder here, or has no head.
    """
    settings, leaves = read_settings(port)
    if not settings.tied and "lm_head.kernel" not in leaves:
        raise GdnError("the checkpoint has no head (lm_head), so that there are no logits")
    if not at_once:
        check_leaves(port, settings, {name: leaf.shape for name, leaf in leaves.items()})
        return _layer_by_layer(port, settings, ids, prefilled, backend)
    model = load_model(port, dtype=jnp.float32, backend=backend, precision="highest")
    logits, past = _run()(model, ids[:, :prefilled], model.init_cache(1, ids.shape[1]))
    parts = [np.asarray(logits)]
    for layer in model.layers:
        _stepping(layer, backend)
    for t in range(prefilled, ids.shape[1]):
        logits, past = _run()(model, ids[:, t : t + 1], past)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


@cache
def _run() -> Any:
    return nnx.jit(lambda model, ids, past: model(ids, None, past))


@cache
def _run_layer() -> Any:
    def run(layer: DecoderLayer, x: Array, seen: Array, past: Any, start: Array) -> tuple[Array, Any]:
        return layer(x, start + jnp.arange(x.shape[1])[None], None, seen, past, start)

    return nnx.jit(run)


def _stepping(layer: DecoderLayer, backend: str) -> None:
    """Single tokens run on xla where the kernels are for whole sequences."""
    if layer.linear and backend.startswith("pallas"):
        layer.mixer.backend = "xla"


def _layer_by_layer(port: Path, settings: DecoderSettings, ids: np.ndarray, prefilled: int, backend: str) -> np.ndarray:
    """As above, by the same layers, of which one at a time is in memory: since all tokens are known, it does its part
    for all of them, and gives the next one what it must."""
    numerics = Numerics(jnp.float32, HIGHEST, jnp.float32)
    options = {
        "dtype": jnp.float32, "param_dtype": jnp.float32, "projection_precision": HIGHEST, "precision": "highest",
        "backend": backend, "sharding": None,
    }  # fmt: skip
    count = ids.shape[1]
    seen = jnp.ones((1, count), bool)  # what is not there yet lies behind each token
    table = load_stacks(port, {"table": "embed.embedding"})["table"]
    x = table[jnp.asarray(ids)].astype(jnp.float32)
    for number in range(len(settings.linear)):
        make = partial(DecoderLayer, settings, number, options, numerics)
        layer = _loaded(port, f"layers.{number}.", partial(_drawn, make))
        past = layer.mixer.init_state(1) if layer.linear else layer.attention.init_cache(1, count, jnp.float32)
        y, past = _run_layer()(layer, x[:, :prefilled], seen, past, jnp.int32(0))
        parts = [y]
        _stepping(layer, backend)
        for t in range(prefilled, count):
            y, past = _run_layer()(layer, x[:, t : t + 1], seen, past, jnp.int32(t))
            parts.append(y)
        x = jnp.concatenate(parts, axis=1)
    eps, centred = settings.norm_eps, settings.zero_centred
    x = _loaded(port, "norm.", lambda: Norm(settings.hidden_size, eps, centred, numerics))(x)
    head = table.T if settings.tied else load_stacks(port, {"head": "lm_head.kernel"})["head"]
    return np.asarray(jnp.dot(x, head.astype(jnp.float32), precision=HIGHEST))


def _drawn(make: Callable[[nnx.Rngs], Any]) -> Any:
    return make(nnx.Rngs(0))


def _loaded(port: Path, start: str, make: Callable[[], Any]) -> Any:
    """The module that ``make`` makes, with the port's leaves whose names begin so."""
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = [(path, leaf, start + ".".join(map(str, path))) for path, leaf in nnx.to_flat_state(state)]
    loaded = load_stacks(port, {name: name for _, _, name in flat})
    return nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(loaded[name])) for path, leaf, name in flat]))
