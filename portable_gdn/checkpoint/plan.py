"""What a port will write, worked out from headers alone, and complete: every tensor of the source has its place or an
error.

``plan_port`` goes from a checkpoint to a target dialect, ``plan_back`` from a port to what it was made of. Both give a
``Plan``: files to write, tensors in each, and for each tensor the pieces that it is made of.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..spec.errors import GdnError, bad
from .copying import copy
from .dtypes import FLOATS, dtype_of, itemsize
from .families import ALL, Family, Mixer, family_named
from .families.family import KEEP_FLOAT32, MIXER_PIECES
from .header import Header
from .lora import PREFIX, is_adapter, with_factors
from .reader import Checkpoint
from .table import MEANING, SCALE, Bound, Dialect, Key, Made, Place, Spec, bind, describe, lay_out
from .targets.family import FAMILY_TARGETS, family_target
from .targets.jax import jax_dialect
from .targets.maxtext import LAYOUTS, maxtext_dialect, period_of

__all__ = [
    "ROOTS",
    "STEP",
    "TARGETS",
    "TREES",
    "Move",
    "Output",
    "Part",
    "Plan",
    "Read",
    "Shard",
    "Skipped",
    "plan_port",
    "read",
    "shards",
]

FLOAT8 = ("F8_E4M3", "F8_E5M2")
TARGETS = ("jax", "nnx", "orbax", "maxtext", *FAMILY_TARGETS)
TREES = ("jax", "nnx", "orbax")  # those in our own tree
STEP = "step"  # MaxText's trees have one
ROOTS = {"orbax": "state", "maxtext": "0/items"}
"""What ``--to`` takes."""


@dataclass(frozen=True)
class Part:
    """One piece of an output: where it comes from, and the segment and indices of the output it goes to."""

    place: Place
    segment: int
    index: Mapping[str, int]


class Move(NamedTuple):
    """Elements of a source's tensor, axes in the output's order, and where they go to.

    at: bytes of the tensor before the first of them. segment, along: of the output's layout.
    """

    name: str
    elements: np.ndarray
    at: int
    segment: int = 0
    along: Mapping[str, int] = {}


@dataclass(frozen=True)
class Output:
    """A tensor to write. ``made`` None copies the source's tensor ``parts`` names; no parts at all are zeros."""

    name: str
    spec: Spec
    made: Made | None = None
    parts: tuple[Part, ...] = ()
    copied: str | None = None
    cast: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.spec.shape) * itemsize(self.spec.dtype)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source's tensors that go into it."""
        if self.copied is not None:
            return (self.copied,)
        return tuple(dict.fromkeys(part.place.bound.name for part in self.parts))

    @property
    def verbatim(self) -> str | None:
        """The source's tensor whose very bytes these are, where that can be seen at once."""
        if self.copied is not None:
            return self.copied
        if len(self.parts) == 1 and self.made is not None and not self.cast:
            (part,) = self.parts
            lay = part.place.bound.entry.layout
            own = self.made.entry.layout
            if len(lay.segments) == len(own.segments) == 1 and lay.dims(0) == own.dims(0):
                return None if lay.indices or own.indices else part.place.bound.name
        return None

    def slabs(self, most: int) -> list[tuple[int, int]]:
        """Ranges whose bytes are at most ``most``, where the tensor can be cut; else one range (0, -1).

        They are of the leading dim, or of bytes where they are a source's very bytes.
        """
        if self.nbytes <= most:
            return [(0, -1)]
        if self.verbatim is not None:
            total, step = self.nbytes, most
        else:
            lead = self.leading
            if lead is None:
                return [(0, -1)]
            total = self._sizes()[lead]
            step = max(1, most * total // self.nbytes)
        return [(n, min(n + step, total)) for n in range(0, total, step)]

    @property
    def leading(self) -> str | None:
        """The dim or index along which it can be written in slabs."""
        return self.made.entry.layout.leading if self.made is not None and self.parts else None

    def _sizes(self) -> Mapping[str, int]:
        assert self.made is not None
        return self.made.sizes

    def moves(self, slab: tuple[int, int], source: Callable[[str], np.ndarray]) -> list[Move]:
        """What a slab is made of; ``source`` gives tensors by name, of which nothing is looked at yet."""
        low, high = slab
        if self.verbatim is not None:
            flat = source(self.verbatim).reshape(-1).view(np.uint8)
            return [Move(self.verbatim, flat if high < 0 else flat[low:high], low)]
        if not self.parts:
            return []
        assert self.made is not None
        lay, lead = self.made.entry.layout, self.leading
        cut = high >= 0 and lead is not None
        found = []
        for part in self.parts:
            bound = part.place.bound
            index = dict(part.index)
            if cut and lead is not None and lead[0] == "@":
                if not low <= index[lead[1:]] < high:
                    continue
                index[lead[1:]] -= low
            whole = source(bound.name)
            view = bound.entry.layout.view(whole, bound.sizes, part.place.segment, part.place.along)
            axes = bound.entry.layout.dims(part.place.segment)
            if cut and lead is not None and lead[0] != "@":
                view = view[(slice(None),) * axes.index(lead) + (slice(low, high),)]
            wanted = lay.dims(part.segment)
            view = view.transpose([axes.index(dim) for dim in wanted])
            found.append(Move(bound.name, view, view.ctypes.data - whole.ctypes.data, part.segment, index))
        return found

    def fill(self, slab: tuple[int, int], moves: Iterable[Move], buffer: np.ndarray | None = None) -> np.ndarray:
        """The elements of one slab, contiguous, in ``buffer`` if it is large enough."""
        dtype = dtype_of(self.spec.dtype)
        if self.verbatim is not None:
            (move,) = moves
            return move.elements
        if not self.parts:
            return np.zeros(self.spec.shape, dtype)
        assert self.made is not None
        lay, sizes, lead = self.made.entry.layout, dict(self.made.sizes), self.leading
        low, high = slab
        if high >= 0 and lead is not None:
            sizes[lead] = high - low
        shape = lay.shape(sizes)
        size = prod(shape) * dtype.itemsize
        room = buffer is not None and buffer.nbytes >= size
        out = buffer[:size].view(dtype).reshape(shape) if room else np.empty(shape, dtype)  # type: ignore[index]
        for move in moves:
            copy(lay.view(out, sizes, move.segment, move.along), move.elements)
        return out


@dataclass(frozen=True)
class Skipped:
    """Source tensors that a named rule keeps out of the target's tree; they wait in the side file."""

    rule: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Read:
    """A source as its family's table reads it."""

    checkpoint: Checkpoint
    family: Family
    dialect: Dialect
    places: dict[Key, Place]
    sizes: dict[str, int]
    carried: tuple[tuple[str, tuple[str, ...], bool], ...]  # rule, names, whether they belong to the tree
    block: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def mixer(self) -> Mixer | None:
        """What the linear layers compute, or None where the configuration does not say."""
        try:
            return self.family.mixer(self.checkpoint.config)
        except (KeyError, TypeError):
            return None

    @property
    def adapter(self) -> bool:
        """Whether it is an adapter, not a model."""
        return any(key.piece.endswith("#A") for key in self.places)

    @property
    def linear_layers(self) -> list[int]:
        """Layers with linear attention, by what the checkpoint holds."""
        return sorted({key.layer for key in self.places if key.piece in ("A_log", "A_log_2")})


@dataclass
class Plan:
    """Everything that a port will do."""

    target: str
    read: Read
    outputs: list[Output]
    side: list[Output]
    skipped: list[Skipped]
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)
    dequantised: dict[str, str] = field(default_factory=dict)  # weight: its scales
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of data to write."""
        return sum(o.nbytes for o in (*self.outputs, *self.side))

    def fingerprint(self) -> str:
        """What must be unchanged for half a port to be continued."""
        source = self.read.checkpoint
        facts: list[Any] = [self.target, self.read.family.name]
        for name, path in source.files.items():
            stat = path.stat()
            facts.append([name, stat.st_size, stat.st_mtime_ns, hashlib.sha256(source.headers[name].raw).hexdigest()])
        facts += [[o.name, o.spec.dtype, o.spec.shape, o.sources] for o in (*self.outputs, *self.side)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# --- reading -------------------------------------------------------------------------------------------------------


def _prefix(family: Family, names: Sequence[str]) -> str:
    for prefix in family.prefixes:
        if any(name.startswith(prefix + "layers.") for name in names):
            return prefix
    return "model."


def _unread(family: Family, names: Sequence[str]) -> int:
    """How many tensors a family's table and rules say nothing of, by names alone."""
    dialect = Dialect(family.name, family.table, _prefix(family, names))
    rules = [re.compile(rule.pattern) for rule in family.rules]
    count = 0
    for name in names:
        base = name.removesuffix("_scale_inv")
        if not dialect.rows(base)[0] and not any(rule.fullmatch(dialect.normal(name)) for rule in rules):
            count += 1
    return count


def find_family(checkpoint: Checkpoint, named: str | None = None) -> tuple[Family, tuple[str, ...]]:
    """The family whose table reads the checkpoint, told by its tensors; config.json decides where several do.

    Raises:
        GdnError: none does; the sentence names what the nearest one cannot read.
    """
    names = list(checkpoint.where)
    if named is not None:
        family = family_named(named)
        if family is None:
            raise bad("--family", repr(named), f"be one of {', '.join(f.name for f in ALL)}")
        return family, ()
    said = checkpoint.config.get("model_type")
    promised = family_named(said) if isinstance(said, str) else None
    order = sorted(ALL, key=lambda family: family is not promised)
    left = {family.name: _unread(family, names) for family in order}
    best = min(order, key=lambda family: left[family.name])
    if promised is not None and left[promised.name] == left[best.name]:
        return promised, ()
    if left[best.name] == 0:
        return best, (f"config.json says model_type {said}; the tensors are those of {best.title}, and are read so",)
    if promised is not None and left[best.name] > 0:
        best = promised
    if left[best.name] == len(names):
        raise GdnError(
            f"{checkpoint.folder} holds no model that is known here (model_type {said}); its tensors must be "
            f"those of one of "
            f"{', '.join(f.title for f in ALL)}."
        )
    return best, ()


def read(checkpoint: Checkpoint, family: str | None = None, base: Mapping[str, Any] | None = None) -> Read:
    """Read a checkpoint by its family's table; ``base`` is the configuration of the model that an adapter is for.

    Raises:
        GdnError: a tensor is unknown, contradicts the table, is there twice, or a scale is missing.
    """
    names = list(checkpoint.where)
    adapter = is_adapter(names)
    if adapter != (base is not None):
        raise bad("--base", "not given" if adapter else "given", "be given for an adapter, and for nothing else")
    if base is not None:
        checkpoint.config = dict(base)
        family = family or str(base.get("model_type"))
    found, notes = find_family(checkpoint, family)
    prefix = _prefix(found, [name.removeprefix(PREFIX) for name in names])
    dialect = Dialect(found.name, found.table, PREFIX + prefix if adapter else prefix)
    if adapter:
        dialect = with_factors(dialect)
    rules = [(rule, re.compile(rule.pattern)) for rule in found.rules]
    carried: dict[str, tuple[list[str], bool]] = {}
    inventory: dict[str, Spec] = {}
    layers = (checkpoint.config.get("text_config") or checkpoint.config).get("num_hidden_layers")
    for name, spec in checkpoint.inventory.items():
        normal = dialect.normal(name)
        number = re.match(r"model\.layers\.(\d+)\.", normal)
        if number and isinstance(layers, int) and int(number[1]) >= layers:
            carried.setdefault("layers after the last one (multi-token prediction)", ([], False))[0].append(name)
            continue
        for rule, pattern in rules:
            if pattern.fullmatch(normal):
                carried.setdefault(rule.name, ([], rule.tree))[0].append(name)
                break
        else:
            inventory[name] = spec
    quantised = (
        _text(checkpoint.config).get("quantization_config") or checkpoint.config.get("quantization_config") or {}
    )
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if block is not None and (
        not isinstance(block, list) or len(set(block)) != 1 or not isinstance(block[0], int) or block[0] < 1
    ):
        raise bad("weight_block_size", block, "be two equal whole numbers")
    known = found.dims(checkpoint.config)
    for dim, size in known.items():
        if isinstance(size, bool) or not 0 < size < 2**31:
            raise bad(f"config.json's {MEANING.get(dim, dim)}", size, "be a positive whole number")
    linear = linear_layers(checkpoint.config) if adapter else ()
    places, unknown, sizes = bind(dialect, inventory, known, block[0] if block else None, linear)
    if unknown:
        some = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
        raise GdnError(
            f"{found.title} has no tensors like {some}; every tensor must be known, and nothing was written."
        )
    for key, place in places.items():
        eight = place.bound.spec.dtype in FLOAT8 and not place.bound.scale
        if eight and key._replace(piece=key.piece + SCALE) not in places:
            name = place.bound.name
            raise GdnError(
                f"{name} is {place.bound.spec.dtype} and {name}_scale_inv is not there; a weight in eight bits "
                f"must have "
                f"its block scales."
            )
    return Read(
        checkpoint,
        found,
        dialect,
        places,
        sizes,
        tuple((r, tuple(n), t) for r, (n, t) in carried.items()),
        block[0] if block else None,
        notes,
    )


def linear_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with linear attention by the configuration: for adapters, which do not hold what would tell."""
    config = _text(config)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")
    kda = (config.get("linear_attn_config") or {}).get("kda_layers")
    if isinstance(kda, list):
        return tuple(n - 1 for n in kda)  # counted from 1
    count, full = (
        config.get("num_hidden_layers"),
        config.get("full_attention_interval") or config.get("layer_group_size"),
    )
    if isinstance(config.get("attn"), dict):
        return tuple(n for n in range(count or 0) if n not in config["attn"].get("layers", ()))
    return tuple(n for n in range(count or 0) if not full or (n + 1) % full)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


# --- forward -------------------------------------------------------------------------------------------------------


def plan_port(source: Read, to: str, dtype: str | None = None, layout: str | None = None) -> Plan:
    """What ``--to`` a target will write.

    Args:
        source: what ``read`` found.
        to: a target's name.
        dtype: what weights are cast to ("bfloat16", "float32", "float16"), or None: nothing is cast.
        layout: of MaxText's layers.

    Raises:
        GdnError: the target cannot hold the model.
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
    for place in places.values():
        if place.bound.fault:
            raise GdnError(place.bound.fault)
    made, homeless = lay_out(dialect, places, wanted)
    _check_shared(made.values(), places, source.checkpoint)
    plan = Plan(to, source, [], [], [], dequantised=dequantised, settings=settings)
    for tensor in made.values():
        plan.outputs.append(_output(tensor, places, dtype, plan.casts))
    plan.outputs += _zeros(dialect, made, places)
    left: dict[str, list[str]] = {}
    for key in homeless:
        bound = places[key].bound
        if bound.entry.zeros and source.checkpoint.array(bound.name).any():
            raise GdnError(
                f"{bound.name} has no place in {to} and is not zero; the layer would compute something else without it."
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
    clash = {output.name for output in plan.outputs} & set(tree)
    if clash:
        raise GdnError(f"{sorted(clash)[0]} is a name of the target's own; the source must not have it.")
    inventory = source.checkpoint.inventory
    plan.outputs += [Output(name, inventory[name], copied=name) for name in tree]
    if to == "maxtext":
        plan.outputs.append(Output(STEP, Spec("I32", ())))
    plan.skipped = aside
    plan.side = [Output(name, inventory[name], copied=name) for group in aside for name in group.names]
    order = {name: n for n, name in enumerate(source.checkpoint.where)}
    plan.outputs.sort(key=lambda output: min((order[name] for name in output.sources), default=len(order)))
    return plan


def _target(source: Read, to: str, how: str | None) -> tuple[Dialect, Callable[[Key], bool] | None, dict[str, Any]]:
    """The target's dialect, which pieces it wants (None: all), and settings that the way back must know."""
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
    """As ``_target``, for adapters: in our tree, or on another family's layers."""
    if to in TREES:
        return with_factors(jax_dialect(source.family)), None, {"lora": True}
    if to not in FAMILY_TARGETS:
        raise bad("--to", repr(to), f"be one of {', '.join((*TREES, *FAMILY_TARGETS))} for an adapter")
    family = family_target(to, source.family, source.mixer)
    dialect = with_factors(Dialect(family.name, family.table, PREFIX + "model."))
    return dialect, _of_mixer, {"lora": True, "family": family.name}


def _of_mixer(key: Key) -> bool:
    return key.piece.partition("#")[0] in MIXER_PIECES


def _output(tensor: Made, places: Mapping[Key, Place], dtype: str | None, casts: dict[str, tuple[str, str]]) -> Output:
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
    return Output(tensor.name, Spec(name, tensor.shape), tensor, parts, cast=name != was or bool(have))


def _check_shared(tensors: Iterable[Made], places: Mapping[Key, Place], checkpoint: Checkpoint) -> None:
    """Pieces that become one tensor must be the same.

    Raises:
        GdnError: they are not.
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


def _zeros(dialect: Dialect, made: Mapping[str, Made], places: Mapping[Key, Place]) -> list[Output]:
    """Tensors that the dialect has and the source lacks, where zeros mean the same."""
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


# --- files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A file to write: its path in the folder, what stands before and behind the tensors, and these in order."""

    name: str
    header: bytes
    outputs: tuple[Output, ...]
    trailer: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(o.nbytes for o in self.outputs) + len(self.trailer)


def shards(outputs: Sequence[Output], stem: str, most: int) -> list[Shard]:
    """Distribute tensors over files of at most ``most`` bytes (a larger tensor has one for itself)."""
    groups: list[list[Output]] = []
    size = 0
    for output in outputs:
        if not groups or size + output.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.nbytes
    return [
        Shard(f"{stem}-{n:05d}-of-{len(groups):05d}.safetensors", _header(group), tuple(group))
        for n, group in enumerate(groups, 1)
    ]


def _header(outputs: Sequence[Output]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "portable-gdn"}}
    at = 0
    for output in outputs:
        entries[output.name] = {
            "dtype": output.spec.dtype, "shape": list(output.spec.shape), "data_offsets": [at, at + output.nbytes],
        }  # fmt: skip
        at += output.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- back ----------------------------------------------------------------------------------------------------------


def plan_back(record: Record, port: Checkpoint, lossy: bool = False) -> tuple[list[Output], list[str]]:
    """What a port was made of, as tensors to write, in the order of the original's files and their data.

    Args:
        record: what the port wrote down about its source.
        port: the port's files, its side files among them.
        lossy: whether tensors that a cast made smaller may be cast back.

    Returns:
        The outputs, and the names of those whose bytes cannot be the original's, because a cast lost some.

    Raises:
        GdnError: the port is not whole, has tensors that the original had no place for, or a cast lost bytes.
    """
    family = family_named(record.family)
    if family is None:
        raise bad("the port's family", repr(record.family), "be one that this version knows")
    originals = {
        name: Spec(t.dtype, t.shape) for header in record.headers.values() for name, t in header.tensors.items()
    }
    carried = {name for names in record.carried.values() for name in names}
    scales = set(record.dequantised.values())
    dialect = Dialect(family.name, family.table, record.prefix)
    if record.settings.get("lora"):
        dialect = with_factors(dialect)
    layers = record.linear_layers
    wanted, unknown, _ = bind(
        dialect, {n: s for n, s in originals.items() if n not in carried}, record.sizes, record.block, layers
    )
    if unknown:
        raise GdnError(
            f"{unknown[0]} was in the port's source and is not known to this version; it cannot be written back."
        )
    inventory = {
        n: s for n, s in port.inventory.items() if n not in carried and (n, record.target) != (STEP, "maxtext")
    }
    have, extra, _ = bind(
        port_dialect(record.target, family, record.settings), inventory, record.sizes, record.block, layers
    )
    if extra:
        raise GdnError(f"{extra[0]} is in the port and was not in its source; the way back has no place for it.")
    bounds: dict[str, dict[Key, tuple[int, dict[str, int]]]] = {}
    kinds: dict[str, Bound] = {}
    for key, place in wanted.items():
        name = place.bound.name
        if name in scales or name in record.dequantised:
            continue
        if key not in have:
            raise GdnError(f"{describe(key)}, which {name} is made of, is not in the port; it must be whole.")
        bounds.setdefault(name, {})[key] = (place.segment, dict(place.along))
        kinds[name] = place.bound
    for key in have.keys() - wanted.keys():
        bound = have[key].bound
        if not bound.entry.zeros or port.array(bound.name).any():
            raise GdnError(
                f"{bound.name} holds {describe(key)}, for which the source has no place; it must be all zeros."
            )
    outputs, lost = [], []
    for name, spec in originals.items():
        if name in carried:
            if port.inventory.get(name) != spec:
                raise GdnError(f"{name} was carried over unchanged and is not in the port as it was; it must be.")
            outputs.append(Output(name, spec, copied=name))
            continue
        if name in scales or name in record.dequantised:
            lost.append(name)
            continue
        bound = kinds[name]
        made = Made(name, bound.entry, dict(bound.index), bound.scale, dict(bound.sizes), bounds[name])
        _check_shared([made], have, port)
        parts = tuple(Part(have[key], segment, index) for key, (segment, index) in made.parts.items())
        dtypes = {part.place.bound.spec.dtype for part in parts}
        if any(not widens(spec.dtype, dtype) for dtype in dtypes):
            lost.append(name)
        outputs.append(Output(name, spec, made, parts, cast=dtypes != {spec.dtype}))
    if lost and not lossy:
        raise GdnError(
            f"{lost[0]} and {len(lost) - 1} more were cast when they were ported, and lost what their bytes "
            f"held; the way back "
            f"must be asked for with --lossy, which casts them back."
        )
    return outputs, lost


def widens(small: str, large: str) -> bool:
    """Whether every value of one dtype is one of the other, so that a cast there and back returns the bytes."""
    if small == large:
        return True
    return (small, large) in {("BF16", "F32"), ("F16", "F32"), ("F32", "F64"), ("BF16", "F64"), ("F16", "F64")}


def port_dialect(target: str, family: Family, settings: Mapping[str, Any]) -> Dialect:
    """The dialect that a target is written in."""
    if settings.get("lora"):
        other = family_named(str(settings.get("family")))
        own = jax_dialect(family) if other is None else Dialect(other.name, other.table, PREFIX + "model.")
        return with_factors(own)
    if target in TREES:
        return jax_dialect(family)
    if target == "maxtext":
        return maxtext_dialect(family, str(settings.get("layout")), settings.get("period"))
    other = family_named(str(settings.get("family")))
    if target in FAMILY_TARGETS and other is not None:
        return Dialect(other.name, other.table)
    raise bad("the port's target", repr(target), "be one that this version knows")


@dataclass(frozen=True)
class Record:
    """What a port keeps about its source, to be able to go back: see ``provenance``."""

    target: str
    family: str
    prefix: str
    sizes: dict[str, int]
    block: int | None
    headers: dict[str, Header]
    carried: dict[str, tuple[str, ...]]
    dequantised: dict[str, str]
    settings: dict[str, Any]
    linear_layers: tuple[int, ...] = ()
