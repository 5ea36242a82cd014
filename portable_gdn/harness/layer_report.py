"""What a whole layer, or its mixer alone, costs on a TPU, forward or in training, and where the time goes.

A mixer is what a layer has between its projections: convolution, norms, gates, the rule, and the output's norm and
gate. Nothing is computed: the arguments are shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..spec.errors import GdnError, bad
from .compiled import compiled_for
from .shapes import Shape

__all__ = ["DIRECTIONS", "PARTS", "SCOPES", "LayerReport", "LayerShape", "layer_call", "layer_reports"]

SCOPES = ("layer", "mixer")
DIRECTIONS = ("forward", "train")
BACKENDS = ("pallas", "xla")
LAYERS = {"gdn": "GatedDeltaNet", "kda": "KimiDeltaAttention", "gdn2": "GatedDeltaNet2"}
#: The parts of a report: Pallas kernels; XLA's products, which are projections, with what it fused to them; copies from
#: one layout to another; and what else XLA runs.
PARTS = ("kernels", "projections", "copies", "rest")
#: Width between the two factors of the projections of KDA's and GDN-2's gates.
RANK = 128


class LayerShape(NamedTuple):
    """A layer to compile.

    Attributes:
        scope: "layer", or "mixer" for what lies between its projections.
        variant: of ``LAYERS``.
        direction: "forward", or "train" for the output and all gradients from the output's cotangent.
        hidden: channels of the layer's input and output.
        shape: the rest; weights and activations are of its dtype.
        precision: as in ``gated_delta_rule``.
        backend: "pallas" or "xla".
        norm: whether a mixer has the output's norm and gate; a layer always has.
    """

    scope: str
    variant: str
    direction: str
    hidden: int
    shape: Shape
    precision: str | None = None
    backend: str = "pallas"
    norm: bool = True

    def check(self) -> None:
        """Refuse what there is not.

        Raises:
            GdnError: in a sentence.
        """
        for name, value, known in (
            ("--op", self.scope, SCOPES),
            ("--variant", self.variant, tuple(LAYERS)),
            ("--direction", self.direction, DIRECTIONS),
            ("--backend", self.backend, BACKENDS),
        ):
            if value not in known:
                raise bad(name, repr(value), f"be one of {', '.join(known)} for a layer")
        if self.hidden < 1:
            raise bad("--hidden-size", self.hidden, "be at least 1")
        if self.scope == "layer" and not self.norm:
            raise bad("--no-norm", "given for a layer", "go with --op mixer: a layer has its norm")
        if self.shape.sequences:
            raise bad("--sequences", self.shape.sequences, "be 0 for a layer")


class LayerReport(NamedTuple):
    """A layer compiled for a chip; schedule: ``portable_gdn.tpu.schedule``'s; plan: which kernels, how, and why."""

    layer: LayerShape
    schedule: Any
    plan: str = ""

    def operations(self) -> list[tuple[str, Any]]:
        """Each operation of the program, and its part."""
        s = self.schedule
        return [*(("kernels", k) for k in s.kernels), *((_part(k), k) for k in s.others)]

    def seconds(self) -> dict[str, float | None]:
        """Time by part; None where how often an operation runs is not known."""
        return {part: self._sum(lambda k: k.seconds(self._chip), part) for part in PARTS}

    def bytes(self) -> dict[str, float | None]:
        """HBM traffic by part."""
        return {part: self._sum(lambda k: k.hbm_bytes, part) for part in PARTS}

    @property
    def total_seconds(self) -> float | None:
        """Time of the whole program, one operation after the other."""
        return _added(self.seconds().values())

    @property
    def total_bytes(self) -> float | None:
        """HBM traffic of the whole program."""
        return _added(self.bytes().values())

    @property
    def floor_seconds(self) -> float | None:
        """What no schedule of the same products can beat: all of them at the matrix units' peak, or arguments and
        results moved once, whichever is longer."""
        chip = self._chip
        products = _added(self._sum(lambda k: k.units.get("MXU", 0.0), part) for part in PARTS)
        memory = self.schedule.memory
        moved = memory.get("arguments", 0) + memory.get("results", 0)
        return None if products is None else max(products / chip.clock_hz, moved / chip.hbm_bytes_per_second)

    @property
    def _chip(self) -> Any:
        from ..tpu.chips import chip_named

        return chip_named(self.schedule.chip)

    def _sum(self, figure: Callable[[Any], Any], part: str) -> float | None:
        found = [(k.times, figure(k)) for of, k in self.operations() if of == part]
        return _added(None if None in pair else pair[0] * pair[1] for pair in found)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.schedule.as_dict()
        return {
            "chip": found.pop("chip"),
            **self.layer._asdict(),
            "shape": self.layer.shape._asdict(),
            "plan": self.plan,
            "seconds": self.seconds(),
            "bytes": self.bytes(),
            "total": {
                "seconds": self.total_seconds,
                "bytes": self.total_bytes,
                "floor_seconds": self.floor_seconds,
            },
            "kernels": found.pop("kernels"),
            "other_device_ops": found.pop("other_device_ops"),
            "memory": found.pop("memory"),
            "versions": found.pop("versions"),
        }


def _added(figures: Any) -> float | None:
    found = list(figures)
    return None if any(f is None for f in found) else float(sum(found))


def _part(operation: Any) -> str:
    """The part of an operation of XLA's."""
    if operation.units.get("MXU"):
        return "projections"
    moves = ("copy", "transpose", "reshape", "bitcast")
    if operation.opcode.startswith(moves) or operation.name.startswith(moves):
        return "copies"
    return "rest"


def _layer(of: LayerShape, sharding: Any = None) -> Any:
    """The layer, with shapes for weights."""
    import jax.numpy as jnp
    from flax import nnx

    from .. import layers

    s = of.shape
    options: dict[str, Any] = {
        "num_heads": s.heads, "num_value_heads": s.value_heads, "key_dim": s.key_dim, "value_dim": s.value_dim,
        "dtype": getattr(jnp, s.dtype), "param_dtype": getattr(jnp, s.dtype), "precision": of.precision,
        "backend": of.backend, "sharding": sharding,
    }  # fmt: skip
    if of.variant != "gdn":
        options |= {"decay_rank": RANK, "gate_rank": RANK}
    make = getattr(layers, LAYERS[of.variant])
    return nnx.eval_shape(lambda: make(of.hidden, **options, rngs=nnx.Rngs(0)))


def layer_call(of: LayerShape, sharding: Any = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of JAX arrays that runs the layer or its mixer, and the shapes of its arguments.

    Args:
        of: what is compiled.
        sharding: of a layer, a ``portable_gdn.Sharding`` with a mesh over which it is split: its weights by heads, its
            input by rows or tokens.

    Raises:
        GdnError: the layer cannot be, or flax is not installed.
    """
    of.check()
    try:
        import jax
        import jax.numpy as jnp
        from flax import nnx
    except ImportError as error:
        raise GdnError(f"{error.name} is not installed; `pip install 'portable-gdn[nnx]'` brings it.") from None
    from ..api import gated_delta_mixer

    layer, s = _layer(of, sharding), of.shape
    graph, weights = nnx.split(layer)
    x = jax.ShapeDtypeStruct((s.batch, s.seqlen, of.hidden), getattr(jnp, s.dtype))
    if sharding is not None:
        weights, x = _placed(layer, weights, x, sharding)
    forward: Callable[..., Any]
    given: tuple[Any, ...]
    if of.scope == "layer":
        forward, given = lambda weights, x: nnx.merge(graph, weights)(x)[0], (weights, x)
    else:
        rest: dict[str, Any] = {}

        def arrays_of(weights: Any, x: Any) -> Any:
            arguments = nnx.merge(graph, weights).mixer_arguments(x)
            if not of.norm:
                arguments |= {"output_norm": None, "z": None}
            arrays, others = _arrays(arguments)
            rest.update(others)
            return arrays

        def mixer(arrays: Any) -> Any:
            o, _ = gated_delta_mixer(**_joined(arrays, rest))
            return o.reshape(*o.shape[:2], -1)  # as a projection reads it

        forward, given = mixer, (jax.eval_shape(arrays_of, weights, x),)
    if of.direction == "forward":
        return forward, given

    def train(given: tuple[Any, ...], cotangent: Any) -> Any:
        y, pull = jax.vjp(forward, *given)
        return y, pull(cotangent)

    y = jax.eval_shape(forward, *given)
    if sharding is not None:
        y = jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=x.sharding)
    return train, (given, y)


def _placed(layer: Any, weights: Any, x: Any, sharding: Any) -> tuple[Any, Any]:
    """The shapes of a layer's weights and input with their places on the mesh of a sharding."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from ..layers.axes import partition_specs

    mesh, heads = sharding.mesh, sharding.axes("heads")
    specs = partition_specs(layer, mesh, {"heads": heads, "key_heads": heads})
    there = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    rows = PartitionSpec(sharding.axes("batch") or None, sharding.axes("sequence") or None)
    return jax.tree.map(there, weights, specs), there(x, rows)


def _arrays(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A mixer's arrays by name, and its other arguments, with dataclasses that held arrays taken apart."""
    import dataclasses

    arrays: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in arguments.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            arrays |= {f"{name}.{n}": a for n, a in fields.items() if hasattr(a, "shape")}
            rest[name] = type(value), {n: a for n, a in fields.items() if not hasattr(a, "shape")}
        elif isinstance(value, tuple) or hasattr(value, "shape"):
            arrays[name] = value
        else:
            rest[name] = value
    return arrays, rest


def _joined(arrays: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """The way back of ``_arrays``."""
    found = {name: a for name, a in arrays.items() if "." not in name}
    for name, value in rest.items():
        if isinstance(value, tuple):
            kind, fields = value
            own = {n.partition(".")[2]: a for n, a in arrays.items() if n.startswith(f"{name}.")}
            value = kind(**fields, **own)
        found[name] = value
    return found


def layer_reports(
    of: LayerShape,
    chips: Sequence[str],
    *,
    use_cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[LayerReport | GdnError]:
    """Reports of one layer, a chip each, or why there is none.

    Raises:
        GdnError: the layer cannot be, or nothing can be compiled here.
    """
    found = compiled_for(chips, lambda: layer_call(of), use_cache=use_cache, progress=progress)
    return [s if isinstance(s, GdnError) else LayerReport(of, s, plan) for s, plan in found]
