"""Load a port into JAX: its leaves, each read directly onto its devices, or layers that are ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..parallel.axes import call_sharding
from ..spec.errors import GdnError, bad
from . import provenance
from .completeness import Kinds, absent, only_linear, refuse_incomplete, without_head
from .configuration import check_config, text_config
from .families import family_named
from .mixer_settings import mixer_settings
from .reader import Checkpoint
from .table import bind
from .targets import TREES
from .targets.jax import jax_dialect

__all__ = ["load_layer", "load_stacks", "load_tree"]


def load_tree(
    folder: str | Path,
    *,
    under: str = "",
    sharding: Any | Callable[[str, tuple[int, ...]], Any] = None,
    names: Iterable[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Load the leaves of a port as JAX arrays in nested dicts; only the parts that devices receive are read.

    Args:
        folder: A port that ``portable-gdn port --to jax`` wrote.
        under: Load only the leaves below this path, such as "layers.0.mixer"; the tree then begins there.
        sharding: The sharding of every leaf, or a function that returns it for a leaf's path and shape; None means
            JAX's default device.
        names: Load only these leaves.
        progress: Called with a leaf's name, the bytes read before it and the bytes of all leaves, and again at the end.

    Returns:
        The tree, whose keys are the parts of the leaves' paths.

    Raises:
        GdnError: The folder is not a port to jax, is not complete, or has no such leaves.
    """
    folder = Path(folder)
    facts = _facts(folder)
    port = provenance.open_port(folder, facts, side=False)
    _check_whole(folder, facts, port)
    start = under + "." if under else ""
    wanted = [n for n in (port.where if names is None else names) if n.startswith(start)]
    tree: dict[str, Any] = {}
    for name in wanted:
        if name not in port.where:
            raise bad("names", repr(name), "be leaves of the port")
    for name, leaf in _placed(port, {name: name for name in wanted}, sharding, progress):
        *path, last = name.removeprefix(start).split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    if not tree:
        raise bad("under", repr(under), "be a path in the port")
    port.release()
    return tree


def load_stacks(
    folder: str | Path,
    leaves: Mapping[str, str | tuple[str, ...]],
    *,
    sharding: Callable[[str, tuple[int, ...]], Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Load leaves of a port as JAX arrays, and stack some of them along a new first axis while reading.

    Args:
        folder: A port that ``portable-gdn port --to jax`` wrote.
        leaves: For each name that the caller chooses, a leaf, or a tuple of leaves to stack, of one shape and dtype.
        sharding: A function that returns the sharding for a chosen name and a shape (that of the stack); None means
            JAX's default device.
        progress: As in ``load_tree``.

    Returns:
        The arrays by the chosen names.

    Raises:
        GdnError: The folder is not a port to jax, or is not complete.
    """
    folder = Path(folder)
    facts = _facts(folder)
    port = provenance.open_port(folder, facts, side=False)
    _check_whole(folder, facts, port)
    found = dict(_placed(port, leaves, sharding, progress))
    port.release()
    return found


def _placed(
    port: Checkpoint,
    leaves: Mapping[str, str | tuple[str, ...]],
    sharding: Any,
    progress: Callable[[str, int, int], None] | None,
) -> Iterator[tuple[str, Any]]:
    """Yield each leaf, or stack of leaves, placed on its devices; only what a device receives is read."""
    import jax

    say = progress or (lambda name, done, of: None)
    sizes = {
        key: sum(port.where[name][1].nbytes for name in ((names,) if isinstance(names, str) else names))
        for key, names in leaves.items()
    }
    done, of = 0, sum(sizes.values())
    for key, names in leaves.items():
        say(key, done, of)
        done += sizes[key]
        shape = port.where[names if isinstance(names, str) else names[0]][1].shape
        reading: Callable[[Any], np.ndarray]
        if isinstance(names, str):
            reading = _reading(port.array(names))
        else:
            shape = (len(names), *shape)
            reading = _stacking([port.array(name) for name in names])
        where = sharding(key, shape) if callable(sharding) else sharding
        if where is None:
            yield key, jax.numpy.asarray(reading((slice(None),) * len(shape)))
        else:
            yield key, jax.make_array_from_callback(shape, where, reading)
    say("", of, of)


def _reading(array: np.ndarray) -> Callable[[Any], np.ndarray]:
    return lambda index: np.array(array[index])


def _stacking(arrays: list[np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Return a function that reads a part of the arrays' stack; memory holds no more than the part."""
    return lambda index: np.stack([array[index[1:]] for array in arrays[index[0]]])


def load_layer(
    folder: str | Path,
    layer: int,
    *,
    mesh: Any = None,
    rules: Mapping[str, Any] | None = None,
    sharding: Any = None,
    **options: Any,
) -> Any:
    """Load a linear-attention layer of a port, ready to run, as one of ``portable_gdn.layers``.

    Args:
        folder: A port that ``portable-gdn port --to nnx`` (or jax) wrote.
        layer: The number of the layer in the model, counted from 0.
        mesh: A ``jax.sharding.Mesh`` over which the layer's weights and calls are split, by the names of its
            parameters' axes. Each device reads only its own part of each leaf.
        rules: The mesh axes that split "heads", "embed", "batch" and so on; they take precedence over
            ``portable_gdn.parallel.AXIS_RULES``.
        sharding: Instead of a mesh, the sharding of the weights alone, as in ``load_tree``; a function receives whole
            paths, such as "layers.0.mixer.q_proj.kernel".
        **options: Options of the layer, such as dtype, precision and backend.

    Returns:
        The layer, with the weights of the port.

    Raises:
        GdnError: The folder is not such a port or not complete, the layer has no linear attention, mesh and sharding
            are both given, or no rule covers an axis of the mesh.
    """
    from flax import nnx

    folder = Path(folder)
    facts = _facts(folder)
    if layer not in facts["linear_layers"]:
        raise bad("layer", layer, f"be one with linear attention: {', '.join(map(str, facts['linear_layers']))}")
    if facts["mixer"] is None:
        raise GdnError(f"{folder} does not know what its layers compute; the source's config.json must say it.")
    if mesh is None and rules is not None:
        raise GdnError("rules are given without a mesh, whose axes they speak of; mesh must be given.")
    under = f"layers.{layer}.mixer"
    if mesh is not None:
        if sharding is not None:
            raise GdnError("mesh and sharding are both given; one must be left out.")
        options.setdefault("sharding", call_sharding(mesh, rules))
    shapes = _shapes(folder, facts, under)
    make = _lightning if facts["mixer"]["kind"] == "gla" else _mixer
    made = nnx.eval_shape(make(shapes, facts["mixer"], facts["sizes"]["E"], layer, options))
    if mesh is not None:
        sharding = _places(made, under, mesh, rules)
    return _filled(made, load_tree(folder, under=under, sharding=sharding))


def _shapes(folder: Path, facts: dict[str, Any], under: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the leaves below a path, by the rest of their paths."""
    port = provenance.open_port(folder, facts, side=False)
    _check_whole(folder, facts, port)
    start = under + "."
    return {name.removeprefix(start): where[1].shape for name, where in port.where.items() if name.startswith(start)}


def _places(made: Any, under: str, mesh: Any, rules: Mapping[str, Any] | None) -> Callable[[str, tuple[int, ...]], Any]:
    """Return a function that gives the sharding of each leaf of a layer, by its whole path."""
    from flax import nnx
    from jax.sharding import NamedSharding

    from ..layers import partition_specs

    specs = nnx.to_flat_state(partition_specs(made, mesh, rules))
    found = {f"{under}.{'.'.join(map(str, path))}": NamedSharding(mesh, spec.get_value()) for path, spec in specs}
    return lambda name, shape: found.get(name)


Shapes = Mapping[str, tuple[int, ...]]


def _mixer(
    shapes: Shapes, mixer: Mapping[str, Any], hidden_size: int, number: int, options: dict[str, Any]
) -> Callable[[], Any]:
    """Return a function that makes the layer for these leaves.

    ``mixer`` says what the layer computes, and the shapes say which projections it has.
    """
    from flax import nnx

    from ..layers.kinds import layer_of_kind

    kind, settings = layer_of_kind(mixer["kind"], mixer_settings(mixer, shapes))
    return lambda: kind(hidden_size, rngs=nnx.Rngs(0), **settings, **options)


def _lightning(
    shapes: Shapes, mixer: Mapping[str, Any], hidden_size: int, number: int, options: dict[str, Any]
) -> Callable[[], Any]:
    """Return a function that makes a lightning-attention layer for these leaves; its number in the model fixes its
    decay."""
    from flax import nnx

    from ..layers import LightningAttention

    if mixer["rope_scaling"] is not None:
        raise GdnError(
            f"the layers' positions are scaled ({mixer['rope_scaling']}, by config.json's rope_scaling), which is not "
            f"computed here; load_tree gives the weights."
        )
    names = ("rotary_dim", "rope_theta", "norm_groups", "norm_eps", "gate", "layers", "num_heads")
    settings = {name: mixer[name] for name in names}
    return lambda: LightningAttention(
        hidden_size,
        head_dim=mixer["key_dim"],
        layer=number,
        qk_norm="q_norm.scale" in shapes,
        rngs=nnx.Rngs(0),
        **settings,
        **options,
    )


def _filled(made: Any, tree: dict[str, Any]) -> Any:
    """Give these weights to a layer that was made without values."""
    from flax import nnx

    graph, state = nnx.split(made)
    want, have = dict(nnx.to_flat_state(state)), dict(_flat(tree))
    if want.keys() != have.keys():
        odd = ".".join(map(str, sorted(want.keys() ^ have.keys(), key=str)[0]))
        raise GdnError(f"{odd} is in the layer or in the port and not in both; they must have the same leaves.")
    for path, leaf in have.items():
        if want[path].shape != leaf.shape:
            raise GdnError(f"{'.'.join(path)} has shape {leaf.shape}; the layer must have {want[path].shape}.")
        want[path] = want[path].replace(leaf)
    return nnx.merge(graph, nnx.from_flat_state(list(want.items())))


def _flat(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, key))
        else:
            yield (*path, key), value


def _check_whole(folder: Path, facts: dict[str, Any], port: Checkpoint) -> None:
    """Compare a port's leaves with those that were written, and with those that its family requires.

    The second comparison finds leaves that were already missing when an older version, which did not check, made the
    port.
    """
    side = {name for names in facts["aside"].values() for name in names}
    lacking = [name for name in facts["tensors"] if name not in port.where and name not in side]
    family = family_named(facts["family"])
    if not lacking and family is not None and not facts["settings"].get("lora"):
        dialect = jax_dialect(family)
        carried = {name for names in facts["carried"].values() for name in names}
        config = provenance.source_config(folder)
        check_config(config)
        inventory = {name: spec for name, spec in port.inventory.items() if name not in carried}
        places, _, sizes = bind(dialect, inventory, facts["sizes"], facts["block"], facts["linear_layers"])
        said = text_config(config).get("num_hidden_layers")
        count = said if isinstance(said, int) else 1 + max((key.layer for key in places), default=-1)
        kinds = Kinds(frozenset(facts["linear_layers"]), count)
        bare = not any("layers." in name for name in facts["source"]["tensors"])
        headless = without_head(facts["prefix"], config)
        lacking = absent(family, dialect, config, places, sizes, kinds, [0] if bare else only_linear(config), headless)
    refuse_incomplete(str(folder), facts["family"], lacking)


def _facts(folder: Path) -> dict[str, Any]:
    facts = provenance.load(folder)
    if facts["target"] not in TREES:
        raise bad(str(folder), f"a port to {facts['target']}", "be one to jax")
    return facts
