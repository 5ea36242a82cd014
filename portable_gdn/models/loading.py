"""Load a ported checkpoint as a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import NamedSharding

from ..checkpoint import provenance
from ..checkpoint.configuration import text_config
from ..checkpoint.header import Tensor
from ..checkpoint.loading import load_stacks
from ..checkpoint.reader import read_json
from ..checkpoint.targets import TREES
from ..parallel.axes import AxisRules
from ..spec.errors import GdnError, bad
from .decoder import Decoder
from .families import settings_of
from .settings import DecoderSettings

__all__ = ["end_tokens", "load_model", "read_settings"]


def load_model(
    port: str | Path,
    dtype: Any = None,
    backend: str | None = None,
    precision: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    scan: bool = True,
    mesh: Any = None,
    rules: AxisRules | None = None,
) -> Decoder:
    """Load the model of a port with its weights; each leaf is read once, and keeps its dtype and its name.

    Args:
        port: The folder that ``portable-gdn port SOURCE FOLDER --to jax`` wrote.
        dtype: The dtype of the computation; None is that of the embedding.
        backend: The backend of the linear-attention layers, as in ``gated_delta_rule``; None chooses one.
        precision: The precision of the linear-attention layers, as in ``gated_delta_rule``. "highest" applies to all
            products: with float32, nothing is rounded on any device.
        progress: Called with the leaf that is read, the bytes read before it, and those of the whole model.
        scan: Whether layers that repeat are compiled once, with stacked weights, as in ``Decoder``.
        mesh: A ``jax.sharding.Mesh`` over which the weights are sharded; each device reads only its own part of the
            files. Calls of the mixers are split in the same way. None is JAX's default device.
        rules: Which axes of the mesh split "batch", "embed", "heads", "mlp", "experts" and "vocabulary"; they take
            precedence over ``portable_gdn.parallel.AXIS_RULES``.

    Raises:
        GdnError: The folder is not a complete port, has no configuration, or is of a family without a decoder here.
    """
    folder = Path(port)
    settings, leaves = read_settings(folder)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    spread = None if mesh is None else (mesh, rules)
    options = {"dtype": dtype, "backend": backend, "precision": precision, "spread": spread}
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0), scan=scan, **options))
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
    if any(len({dtypes.get(n) for n in model.names(path)}) > 1 for path, _ in nnx.to_flat_state(nnx.state(model))):
        model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0), scan=False, **options))
    graph, state = nnx.split(model)
    places = {".".join(map(str, path)): (path, leaf, model.names(path)) for path, leaf in nnx.to_flat_state(state)}
    want = {name: leaf.shape[len(names) > 1 :] for _, leaf, names in places.values() for name in names}
    _check_leaves(folder, want, shapes, settings)
    asked = {key: names if len(names) > 1 else names[0] for key, (_, _, names) in places.items()}
    where = None
    if mesh is not None:
        specs = {".".join(map(str, path)): spec for path, spec in model.partition_specs(mesh, rules).items()}
        where = lambda key, shape: NamedSharding(mesh, specs[key])  # noqa: E731
    loaded = load_stacks(folder, asked, sharding=where, progress=progress)
    filled = [(path, leaf.replace(loaded.pop(key))) for key, (path, leaf, _) in places.items()]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def read_settings(folder: Path) -> tuple[DecoderSettings, dict[str, Tensor]]:
    """Return the settings of a port's model, and its leaves by name.

    Raises:
        GdnError: The folder is not a port in our tree, is an adapter, or is of a family without a decoder here.
    """
    facts = provenance.load(folder)
    if facts["target"] not in TREES:
        raise bad(str(folder), f"a port to {facts['target']}", "be one to jax")
    if facts["settings"].get("lora") or facts["adapter"]:
        raise bad(str(folder), "an adapter", "be a whole model: join it with its base, and port that")
    found = provenance.open_port(folder, facts, side=False)
    carried = {name for names in facts["carried"].values() for name in names}
    leaves = {name: found.where[name][1] for name in found.where if name not in carried}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    return settings_of(facts, provenance.source_config(folder), shapes), leaves


def end_tokens(port: str | Path) -> tuple[int, ...]:
    """Return the end-of-text tokens from the port's generation_config.json or config.json, for use as ``stop``."""
    folder = Path(port)
    config = provenance.source_config(folder)
    said = [text_config(config), config]
    if (folder / "generation_config.json").is_file():
        said = [read_json(folder / "generation_config.json"), *said]
    found = next((part["eos_token_id"] for part in said if part.get("eos_token_id") is not None), ())
    tokens = found if isinstance(found, list) else [found] if found != () else []
    return tuple(token for token in tokens if isinstance(token, int) and not isinstance(token, bool))


def check_leaves(folder: Path, settings: DecoderSettings, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a port's leaves with those of the model that its configuration describes.

    Raises:
        GdnError: A leaf is missing, has no place in the model, or has another shape.
    """
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0), scan=False))
    flat = nnx.to_flat_state(nnx.state(model))
    _check_leaves(folder, {model.names(path)[0]: leaf.shape for path, leaf in flat}, shapes, settings)


def _check_leaves(
    folder: Path,
    want: Mapping[str, tuple[int, ...]],
    have: Mapping[str, tuple[int, ...]],
    settings: DecoderSettings,
) -> None:
    lacking = [name for name in want if name not in have]
    if lacking:
        raise GdnError(
            f"{folder} lacks {_some(lacking)} of the model that its config.json describes; it must be whole."
        )
    spare = [name for name in have if name not in want]
    if spare == ["lm_head.kernel"] and settings.tied:
        raise GdnError(
            f"{folder} has lm_head.kernel, and its config.json says by tie_word_embeddings that the head is the "
            f"embedding; they must say the same."
        )
    if spare:
        raise GdnError(f"{folder} has {_some(spare)}, which the model of its config.json has no place for.")
    for name, shape in want.items():
        if tuple(have[name]) != tuple(shape):
            raise GdnError(
                f"{name} of {folder} has shape {list(have[name])}; by config.json it must have {list(shape)}."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
