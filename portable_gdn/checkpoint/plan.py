"""Plan a port from headers alone. A plan is complete: every tensor of the source has its place, or the plan is refused.

``back`` has the plan of the opposite direction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from .adapters import Adapter
from .beside import Beside
from .completeness import Kinds, absent
from .dequantise import Dequantising, Quantised
from .dtypes import FLOAT8, FLOATS
from .families import family_named
from .families.family import KEEP_FLOAT32, MIXER_PIECES
from .joining import Joined, join
from .lora import PREFIX, RANK, Slots, is_factor, with_factors
from .output import Output, Part
from .reader import Checkpoint
from .source import Read
from .table import SCALE, Dialect, Key, Made, Place, Spec, bind, describe, lay_out
from .targets import FAMILY_TARGETS, STEP, TARGETS, TREES
from .targets.family import family_target, target_config
from .targets.jax import jax_dialect
from .targets.maxtext import LAYOUTS, maxtext_dialect, period_of

__all__ = ["Plan", "Skipped", "check_shared", "plan_port"]


@dataclass(frozen=True)
class Skipped:
    """Source tensors that a named rule keeps out of the target's tree; they are stored in the side file."""

    rule: str
    names: tuple[str, ...]


@dataclass
class Plan:
    """Everything that a port will do."""

    target: str
    read: Read
    outputs: list[Output]
    side: list[Output]
    skipped: list[Skipped]
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)
    dequantised: dict[str, str] = field(default_factory=dict)  # from a weight to its scales
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)  # of an adapter, by the name of the projection's first factor
    # by the same names; None if the source does not give the scaling
    scalings: dict[str, float | None] = field(default_factory=dict)
    beside: list[Beside] = field(default_factory=list)
    left: tuple[str, ...] = ()  # sentences about files of the source's folder that are not copied

    @property
    def foreign(self) -> bool:
        """Whether layers become those of another family, or are outside a model, and need their own config.json."""
        family = self.settings.get("family")
        return family is not None and (family != self.read.family.name or self.read.bare) and not self.read.adapter

    @property
    def own_adapter_config(self) -> bool:
        """Whether it is an adapter for another family's layers, whose configuration must name other modules."""
        return self.read.lora is not None and bool(self.read.lora.config) and "family" in self.settings

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what is done without having been requested."""
        return (*self.read.notes, *self._alone, *(file.note for file in self.beside if file.note), *self.left)

    @property
    def _alone(self) -> tuple[str, ...]:
        family = family_named(self.settings.get("family") or "")
        if not self.foreign or family is None:
            return ()
        return (
            f"only linear-attention layers are written, under {family.title}'s names: no model class of transformers "
            f"or flash-linear-attention loads them, and whatever else the source has waits in the side file",
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes of data to write."""
        return sum(o.nbytes for o in (*self.outputs, *self.side))

    def fingerprint(self) -> str:
        """A hash of everything that must be unchanged when an interrupted port is continued."""
        source = self.read.checkpoint
        facts: list[Any] = [self.target, self.read.family.name, isinstance(source, Dequantising)]
        for name, path in source.files.items():
            stat = path.stat()
            facts.append([name, stat.st_size, stat.st_mtime_ns, hashlib.sha256(source.headers[name].raw).hexdigest()])
        facts += [[file.name, file.size, file.path.stat().st_mtime_ns] for file in self.beside]
        facts += [[o.name, o.spec.dtype, o.spec.shape, o.sources] for o in (*self.outputs, *self.side)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plan_port(source: Read, to: str, dtype: str | None = None, layout: str | None = None) -> Plan:
    """Plan what ``--to`` a target will write.

    Args:
        source: What ``read`` returned.
        to: The name of a target.
        dtype: The dtype to which weights are cast ("bfloat16", "float32", "float16"), or None to cast nothing.
        layout: The layout of MaxText's layers.

    Raises:
        GdnError: The target cannot hold the model.
    """
    if dtype is not None and dtype not in FLOATS:
        raise bad("--dtype", repr(dtype), f"be one of {', '.join(FLOATS)}")
    dialect, wanted, settings = _target(source, to, layout)
    places = source.places
    dequantised: dict[str, str] = {}
    if dtype is not None:
        dequantised = {
            place.bound.name: places[key._replace(piece=key.piece + SCALE)].bound.name
            for key, place in places.items()
            if place.bound.spec.dtype in FLOAT8
        }
        places = {key: place for key, place in places.items() if not key.piece.endswith(SCALE)}
    joined = Joined()
    if source.lora is not None:
        joined = join(dialect, places, wanted, source.checkpoint, source.lora, source.sizes, dtype)
        places = {key: place for key, place in places.items() if key not in joined.keys}
    for place in places.values():
        if place.bound.fault:
            raise GdnError(place.bound.fault)
    made, homeless = lay_out(dialect, places, wanted)
    check_shared(made.values(), places, source.checkpoint)
    plan = Plan(to, source, [], [], [], dequantised=dequantised, settings=settings)
    quantised = source.checkpoint.quantised if isinstance(source.checkpoint, Dequantising) else {}
    for tensor in made.values():
        plan.outputs.append(_output(tensor, places, dtype, plan.casts, quantised))
    plan.outputs += _zeros(dialect, made, places)
    if source.lora is not None:
        _settle_adapter(plan, source.lora, joined, made, places)
    elif wanted is not None:
        _check_target(plan)
    left: dict[str, list[str]] = {}
    for key in homeless:
        bound = places[key].bound
        bias = key.piece.endswith("bias") or bound.entry.zeros
        if _of_mixer(key) and not (bias and not source.checkpoint.array(bound.name).any()):
            raise GdnError(
                f"{bound.name} has no place in {to} and is not zero; the layer would compute something else without it."
                if bias
                else f"{bound.name} holds {describe(key)}, for which {to} has no place; the layer would compute "
                f"something else without it."
            )
        left.setdefault(places[key].bound.name, []).append(describe(key))
    used = {name for output in plan.outputs for name in output.sources}
    for name in used & set(left):
        raise GdnError(
            f"{name} holds {left[name][0]}, for which {to} has no place, beside pieces that it has places for."
        )
    tree: list[str] = []
    aside: list[Skipped] = []
    for rule, names, in_tree in source.carried:
        if in_tree and to in TREES:
            tree += names
        else:
            aside.append(Skipped(rule, names))
    if left:
        aside.append(Skipped(f"no place in {to}", tuple(left)))
    if joined.carried:
        aside.append(Skipped(f"factors of parts, which are joined in {to}", tuple(joined.carried)))
    clash = {output.name for output in plan.outputs} & set(tree)
    if clash:
        raise GdnError(f"{sorted(clash)[0]} is a name of the target's own; the source must not have it.")
    inventory = source.checkpoint.inventory
    plan.outputs += [_aside(name, source.checkpoint, inventory) for name in tree]
    if to == "maxtext":
        plan.outputs.append(Output(STEP, Spec("I32", ())))
    plan.skipped = aside
    plan.side = [_aside(name, source.checkpoint, inventory) for group in aside for name in group.names]
    order = {name: n for n, name in enumerate(inventory)}
    plan.outputs.sort(key=lambda output: min((order[name] for name in output.sources), default=len(order)))
    return plan


def _target(source: Read, to: str, how: str | None) -> tuple[Dialect, Callable[[Key], bool] | None, dict[str, Any]]:
    """Return the target's dialect, which pieces it wants (None: all), and settings that the way back needs."""
    if source.adapter:
        return _adapter_target(source, to)
    if how is not None and to != "maxtext":
        raise bad("--layout", repr(how), "be given with --to maxtext only")
    if to in TREES:
        return jax_dialect(source.family), None, {}
    if to == "maxtext":
        if how is None:
            raise bad("--layout", "not given", f"be one of {', '.join(LAYOUTS)}, or be told by --like a checkpoint")
        period = period_of(source.linear_layers, 1 + max(key.layer for key in source.places))
        dialect = maxtext_dialect(source.family, how, period)
        if any(key.piece == "mlp_gate" for key in source.places):
            raise bad("--to maxtext", "asked for a model without experts", "be for one that MaxText has")
        return dialect, None, {"layout": how, "period": period}
    if to not in FAMILY_TARGETS:
        raise bad("--to", repr(to), f"be one of {', '.join(TARGETS)}")
    family = family_target(to, source.family, source.mixer)
    every = None if family is source.family else _of_mixer
    return Dialect(family.name, family.table), every, {"family": family.name}


def _adapter_target(source: Read, to: str) -> tuple[Dialect, Callable[[Key], bool] | None, dict[str, Any]]:
    """Do for an adapter what ``_target`` does for a model; it becomes our tree or fits another family's layers."""
    slots = source.lora.slots if source.lora is not None else Slots()
    if to in TREES:
        return with_factors(jax_dialect(source.family), slots), None, {"lora": True}
    if to not in FAMILY_TARGETS:
        raise bad("--to", repr(to), f"be one of {', '.join((*TREES, *FAMILY_TARGETS))} for an adapter")
    family = family_target(to, source.family, source.mixer)
    dialect = with_factors(Dialect(family.name, family.table, PREFIX + "model."), slots)
    return dialect, _of_mixer, {"lora": True, "family": family.name}


def _settle_adapter(
    plan: Plan, adapter: Adapter, joined: Joined, made: Mapping[str, Made], places: Mapping[Key, Place]
) -> None:
    """Record the ranks and scalings of an adapter's projections in the target, by the names of their A."""
    plan.outputs += joined.outputs
    plan.casts.update(joined.casts)
    ranks, scalings = dict(joined.ranks), dict(joined.scalings)
    for name, tensor in made.items():
        key = next(iter(tensor.parts))
        if is_factor(key.piece) and key.piece.partition("#")[2][0] == "A":
            place = places[key]
            ranks[name] = place.bound.sizes[RANK]
            module = adapter.modules[place.bound.name]
            scalings[name] = None if len(adapter.slots.names) > 1 else adapter.scaling(module, ranks[name])
    plan.ranks, plan.scalings = ranks, scalings
    if joined.outputs:
        plan.settings["joined"] = [output.name for output in joined.outputs]


def _of_mixer(key: Key) -> bool:
    return key.piece.partition("#")[0] in MIXER_PIECES


def _output(
    tensor: Made,
    places: Mapping[Key, Place],
    dtype: str | None,
    casts: dict[str, tuple[str, str]],
    quantised: Mapping[str, Quantised],
) -> Output:
    parts = tuple(Part(places[key], segment, index) for key, (segment, index) in tensor.parts.items())
    have = {part.place.bound.spec.dtype for part in parts}
    kept = all(key.piece in KEEP_FLOAT32 for key in tensor.parts)
    was = have.pop()
    if have and dtype is None:
        raise GdnError(
            f"{tensor.name} is made of tensors in {', '.join(sorted({was, *have}))}; it must have one dtype: "
            f"cast with --dtype."
        )
    name = was
    if dtype is not None and was in (*FLOATS.values(), *FLOAT8) and not (kept and was == "F32" and not have):
        name = FLOATS[dtype]
    if name != was or have:
        casts[tensor.name] = ("/".join(sorted({was, *have})), name)
    few = next((q for part in parts if (q := quantised.get(part.place.bound.name))), None)
    if few is not None:
        casts[tensor.name] = (few.scheme, name)
    return Output(
        tensor.name, Spec(name, tensor.shape), tensor, parts, cast=name != was or bool(have) or few is not None
    )


def _aside(name: str, checkpoint: Checkpoint, inventory: Mapping[str, Spec]) -> Output:
    """Return the output for a tensor that is carried over unchanged, or in bfloat16 if it is dequantised."""
    if isinstance(checkpoint, Dequantising) and name in checkpoint.quantised:
        spec = Spec("F32" if checkpoint.wide else "BF16", inventory[name].shape)
        return Output(name, spec, computed=lambda: checkpoint.array(name), made_of=(name,))
    return Output(name, inventory[name], copied=name)


def check_shared(tensors: Iterable[Made], places: Mapping[Key, Place], checkpoint: Checkpoint) -> None:
    """Check that pieces that become one tensor are equal.

    Raises:
        GdnError: They are not.
    """
    for tensor in tensors:
        if tensor.entry.layout.shared:
            names = list(dict.fromkeys(places[key].bound.name for key in tensor.parts))
            first = checkpoint.array(names[0])
            for name in names[1:]:
                if not np.array_equal(first, checkpoint.array(name)):
                    raise GdnError(
                        f"{tensor.name} stands for {names[0]} and {name}, which differ; they must be the same."
                    )


def _check_target(plan: Plan) -> None:
    """Check that layers of another family are complete by that family's rules, too.

    Raises:
        GdnError: The source has no piece for something that they require.
    """
    source, family = plan.read, family_named(plan.settings["family"])
    if family is None or source.mixer is None:
        return
    config = target_config(family, source.mixer, source.sizes, source.linear_layers)
    dialect = Dialect(family.name, family.table)
    inventory = {output.name: output.spec for output in plan.outputs}
    places, _, sizes = bind(dialect, inventory, family.dims(config), source.block, source.linear_layers)
    kinds = Kinds(frozenset(source.linear_layers), 0)
    lacking = absent(family, dialect, config, places, sizes, kinds, source.linear_layers)
    if lacking:
        raise GdnError(
            f"{source.family.title} has nothing that would become {lacking[0]}, which {family.title} must have; its "
            f"layers cannot be ported to {family.title}."
        )


def _zeros(dialect: Dialect, made: Mapping[str, Made], places: Mapping[Key, Place]) -> list[Output]:
    """Return tensors that the dialect has and the source lacks, where zeros have the same effect."""
    found = []
    layers = sorted({key.layer for key in places if key.piece in MIXER_PIECES})
    for entry in dialect.entries:
        (piece, *_) = entry.layout.pieces
        if not entry.zeros or entry.layer >= 0:
            continue
        for layer in layers:
            name = dialect.actual(entry.name.format(i=layer))
            if name in made or Key(piece, layer) in places:
                continue
            sizes = {d: n for key, place in places.items() if key.layer == layer for d, n in place.bound.sizes.items()}
            if all(d in sizes for d in entry.layout.dims(0)):
                like = places.get(Key("g_b", layer))
                if like is not None:
                    tensor = Made(name, entry, {"i": layer}, False, sizes)
                    found.append(Output(name, Spec(like.bound.spec.dtype, tensor.shape), tensor))
    return found
