"""Dequantisation of 8-bit and 4-bit weights during a port (``--dequantise``).

A ``Dequantising`` checkpoint looks as if its weights had been saved in bfloat16. The table lists the formats that are
read, with the names that compressed-tensors, ModelOpt and transformers give to the tensors. Each value is the stored
number times its scale, computed in float32.

    FP8, int8     <module>.weight, with .weight_scale or .weight_scale_inv, both of which multiply. A scale is for the
                  whole tensor, a row ([out] or [out, 1]), a group of g columns ([out, in / g]), or a block whose size
                  the configuration gives.
    NVFP4         <module>.weight_packed holds two e2m1 numbers per byte, the first in the lower four bits.
                  .weight_scale holds one e4m3 number for 16 columns, and .weight_global_scale divides. In ModelOpt's
                  form these are .weight, .weight_scale and .weight_scale_2, which multiplies.
    MXFP4         .weight_packed, and .weight_scale with one exponent for 32 columns: the scale is 2^(n - 127).

Scales of activations and of key-value caches are left out, because bfloat16 does not need them. All scales are checked
before anything is written: NaN, infinite and negative scales are refused, and so are zeros, unless all the numbers that
they multiply are zero.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from .dtypes import FLOAT8, dtype_of
from .quantised import quantisation
from .reader import Checkpoint, Regrouped
from .table import Spec

__all__ = ["Dequantising", "Quantised", "can_dequantise", "find"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([E2M1, -E2M1])  # the fourth bit is the sign
_PAIRS = np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], -1)  # the two numbers that a byte holds
_LEFT_OUT = re.compile(
    r"(?:.*\.)?(?:(?P<input>(?:input|activation|output)_(?:scale(?:_inv|_2)?|global_scale|zero_point)|act_scale)"
    r"|(?P<cache>(?:[qkv]|kv|prob)_(?:scale|zero_point)))"
)
_ROWS = 64 * 2**20  # the most bytes of float32 that are computed at a time
_LARGE = 2**29  # from this size on, in bytes, a dequantised tensor is kept in a file instead of memory


@dataclass(frozen=True)
class Quantised:
    """A weight as it is stored.

    Attributes:
        name: The name that it would have in bfloat16.
        scheme: A description of its format, for messages.
        kind: "8 bit", "nvfp4" or "mxfp4".
        stored: The name of the tensor that holds the numbers.
        scale: The name of the tensor that holds the scales.
        shape: The shape that it has in bfloat16.
        share: The number of rows and of columns that share a scale; 0 means all of them.
        whole: The name of the tensor that holds the global scale, or None.
        divides: Whether the global scale divides, instead of multiplying.
    """

    name: str
    scheme: str
    kind: str
    stored: str
    scale: str
    shape: tuple[int, ...]
    share: tuple[int, int]
    whole: str | None = None  # the global scale
    divides: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the stored tensors."""
        return (self.stored, self.scale, *((self.whole,) if self.whole is not None else ()))

    def as_dict(self) -> dict[str, Any]:
        """Return a description that can be written as JSON."""
        return {"scheme": self.scheme, "stored": self.stored, "scales": list(self.parts[1:])}


def find(
    inventory: Mapping[str, Spec], config: Mapping[str, Any], values: Checkpoint | None = None
) -> tuple[dict[str, Quantised], dict[str, str]]:
    """Find the quantised weights, by the names that they would have in bfloat16, and the tensors to leave out.

    Args:
        inventory: The tensors of the checkpoint.
        config: The contents of config.json, which give the size of blocks.
        values: The checkpoint, to read the shapes that some formats store with packed weights; None skips this check.

    Returns:
        The quantised weights, and for each tensor that is left out the reason.

    Raises:
        GdnError: A scale is missing or has a wrong shape, or a weight has a zero point.
    """
    found: dict[str, Quantised] = {}
    out: dict[str, str] = {}
    for name, spec in inventory.items():
        made = _packed(name, spec, inventory) if name.endswith("_packed") else _plain(name, spec, inventory, config)
        if made is None:
            continue
        if made.name != name and made.name in inventory:
            raise GdnError(
                f"{name} and {made.name} are one weight twice, in few bits and in many; one of them must go."
            )
        found[made.name] = made
        shape = made.name + "_shape"
        if shape in inventory:
            said = None if values is None else tuple(values.array(shape).reshape(-1).tolist())
            if said is not None and said != made.shape:
                raise GdnError(f"{shape} says {list(said)}, and {name} holds {list(made.shape)}; they must agree.")
            out[shape] = "packed weights' shapes"
    used = {part for made in found.values() for part in made.parts}
    for name in inventory:
        place = _LEFT_OUT.fullmatch(name)
        if found and place and name not in used:
            out[name] = "activations' scales" if place["input"] else "the key-value cache's scales"
    return found, out


def _packed(name: str, spec: Spec, inventory: Mapping[str, Spec]) -> Quantised | None:
    if spec.dtype != "U8":
        return None
    base = name.removesuffix("_packed")
    scale, whole = base + "_scale", base + "_global_scale"
    if scale not in inventory:
        raise GdnError(f"{name} is packed and {scale} is not there; a packed weight must have its scales.")
    kind = inventory[scale].dtype
    if whole in inventory or kind == "F8_E4M3":
        return _four_bits(base, name, spec, scale, whole, True, inventory)
    if kind in ("U8", "F8_E8M0"):
        shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.shape else ()
        _must_have(scale, inventory[scale], (*shape[:-1], -(-shape[-1] // 32) if shape else 0), f"32 columns of {base}")
        return Quantised(base, "MXFP4", "mxfp4", name, scale, shape, (1, 32))
    return None


def _four_bits(
    base: str, name: str, spec: Spec, scale: str, whole: str, divides: bool, inventory: Mapping[str, Spec]
) -> Quantised:
    if whole not in inventory:
        raise GdnError(f"{name} is in NVFP4 and {whole} is not there; it must be.")
    shape = (*spec.shape[:-1], 2 * spec.shape[-1])
    if shape[-1] % 16:
        raise GdnError(f"{name} has {shape[-1]} columns; NVFP4 has one scale for 16, so they must be a multiple of it.")
    _must_have(scale, inventory[scale], (*shape[:-1], shape[-1] // 16), f"16 columns of {base}")
    if inventory[scale].dtype != "F8_E4M3":
        raise GdnError(f"{scale} is {inventory[scale].dtype}; scales of NVFP4 must be F8_E4M3.")
    lead = prod(shape[:-2])
    if prod(inventory[whole].shape) not in (1, lead):
        raise GdnError(f"{whole} has shape {list(inventory[whole].shape)}; it must be one number for each matrix.")
    return Quantised(base, "NVFP4", "nvfp4", name, scale, shape, (1, 16), whole, divides)


def _plain(name: str, spec: Spec, inventory: Mapping[str, Spec], config: Mapping[str, Any]) -> Quantised | None:
    """Describe a quantised weight that is stored under its own name: in eight bits, or in ModelOpt's form of NVFP4."""
    scale = next((name + end for end in ("_scale", "_scale_inv") if name + end in inventory), None)
    if scale is None or name.endswith(("_scale", "_global_scale")):
        return None
    if spec.dtype == "U8" and name + "_scale_2" in inventory:
        return _four_bits(name, name, spec, scale, name + "_scale_2", False, inventory)
    if spec.dtype not in (*FLOAT8, "I8"):
        return None
    zero = name + "_zero_point"
    if zero in inventory:
        raise GdnError(f"{zero} is there: weights that are quantised around a zero point cannot be dequantised here.")
    if len(spec.shape) < 2:
        raise GdnError(f"{name} has shape {list(spec.shape)}; a quantised weight must have rows and columns.")
    bits = "int8" if spec.dtype == "I8" else "FP8"
    share, what = _share(name, spec, scale, inventory[scale], config)
    return Quantised(name, f"{bits}, {what}", "8 bit", name, scale, spec.shape, share)


def _share(name: str, spec: Spec, scale: str, found: Spec, config: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    """Return how many rows and columns share a scale, judged by the shape of the scales, and the same in words."""
    *lead, out, inside = spec.shape
    blocks = _block(config)
    shape = found.shape
    if prod(shape) == 1 or shape in ((*lead,), (*lead, 1, 1)):
        return (0, 0), "one scale for each tensor" if not lead else "one scale for each matrix"
    if shape in ((*lead, out), (*lead, out, 1)):
        return (1, 0), "one scale for each channel"
    if blocks is not None and shape == (*lead, -(-out // blocks[0]), -(-inside // blocks[1])):
        return blocks, f"one scale for {blocks[0]} x {blocks[1]}"
    if shape[:-1] == (*lead, out) and len(shape) == len(spec.shape) and shape[-1] and inside % shape[-1] == 0:
        return (1, inside // shape[-1]), f"one scale for {inside // shape[-1]} columns"
    options = f"one number, {[*lead, out, 1]}"
    if blocks is not None:
        options += f", {[*lead, -(-out // blocks[0]), -(-inside // blocks[1])]} (blocks of {blocks[0]} x {blocks[1]})"
    raise GdnError(f"{scale} has shape {list(shape)}; for {name} of shape {list(spec.shape)} it must be {options}.")


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block, from transformers' setting or that of compressed-tensors."""
    said = quantisation(config)
    found = said.get("weight_block_size")
    groups = said.get("config_groups")
    for group in groups.values() if found is None and isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found = found or (weights.get("block_structure") if isinstance(weights, Mapping) else None)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise bad("the block size in quantization_config", found, "be two positive whole numbers")
    return found[0], found[1]


def _must_have(name: str, spec: Spec, shape: tuple[int, ...], what: str) -> None:
    if spec.shape != shape:
        raise GdnError(f"{name} has shape {list(spec.shape)}; it must have {list(shape)}, one scale for {what}.")


def can_dequantise(checkpoint: Checkpoint) -> bool:
    """Whether there are weights that ``Dequantising`` would turn into bfloat16."""
    try:
        return bool(find(checkpoint.inventory, checkpoint.config)[0])
    except GdnError:
        return True  # The user will see the error on requesting --dequantise.


class Dequantising(Checkpoint):
    """A checkpoint whose quantised weights look as if they were bfloat16.

    Attributes:
        quantised: The quantised weights by name.
        left_out: The tensors that are left out, each with the reason.
        wide: Whether arrays are float32 instead, because they will be cast to another dtype.
        scratch: The folder for tensors that are too large for memory; None means the system's temporary folder.
    """

    def __init__(self, checkpoint: Checkpoint, wide: bool = False) -> None:
        """Wrap a checkpoint that is already open.

        Raises:
            GdnError: Nothing is quantised, a quantised weight has no scales, or a reason given in ``find``.
        """
        self.__dict__.update(checkpoint.__dict__)
        self.quantised, self.left_out = find(checkpoint.inventory, checkpoint.config, checkpoint)
        if not self.quantised:
            raise bad("--dequantise", "given", f"be given for weights in few bits with scales; {self.path} has none")
        self._dense: dict[str, Spec] = {}
        for name, spec in self.inventory.items():
            if spec.dtype in (*FLOAT8, "I8") and len(spec.shape) > 1:
                raise GdnError(f"{name} is {spec.dtype} and {name}_scale is not there; it must have its scales.")
        self.wide = wide
        self.scratch: Path | None = None
        self._last: tuple[str, np.ndarray] | None = None

    @property
    def inventory(self) -> dict[str, Spec]:
        """The tensors as they are after dequantisation."""
        if self._dense:
            return self._dense
        by_stored = {made.stored: made for made in self.quantised.values()}
        gone = {part for made in self.quantised.values() for part in made.parts[1:]} | self.left_out.keys()
        found = self._dense
        for name, spec in super().inventory.items():
            if name in by_stored:
                found[by_stored[name].name] = Spec("BF16", by_stored[name].shape)
            elif name not in gone:
                found[name] = spec
        return found

    def stored(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors from which this one is made."""
        return self.quantised[name].parts if name in self.quantised else super().stored(name)

    def regroup(self, found: Mapping[str, Regrouped]) -> None:
        """Treat these tensors as cut in this way from now on."""
        super().regroup(found)
        self._dense = {}

    def array(self, name: str) -> np.ndarray:
        """Return a tensor; a quantised one is in bfloat16 (or float32), and memory keeps only the last of these."""
        if name not in self.quantised:
            return super().array(name)
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._dequantised(self.quantised[name])
        return self._last[1]

    def _dequantised(self, made: Quantised) -> np.ndarray:
        dtype = dtype_of("F32" if self.wide else "BF16")
        size = prod(made.shape) * dtype.itemsize
        out: np.ndarray
        if size > _LARGE:
            # the file is deleted together with the last array that maps it
            with tempfile.TemporaryFile(dir=self.scratch) as file:
                file.truncate(size)
                out = np.memmap(file, dtype, shape=made.shape)
        else:
            out = np.empty(made.shape, dtype)
        matrices = out.reshape(-1, *made.shape[-2:])
        for n, rows, values in self._values(made):
            if not np.isfinite(values).all():
                raise GdnError(
                    f"{made.stored} times {made.scale} is not finite in rows {rows.start} to {rows.stop - 1}; its "
                    f"scales or numbers must be wrong."
                )
            matrices[n, rows] = values
        self.release()
        return out

    def _values(self, made: Quantised) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Yield the values of some rows of each matrix, in float32."""
        *_, out, inside = made.shape
        stored = super().array(made.stored)
        stored = stored.reshape(-1, out, stored.shape[-1])
        scales = self._scales(made)
        step = max(1, _ROWS // (4 * inside))
        for n in range(stored.shape[0]):
            for start in range(0, out, step):
                rows = slice(start, min(start + step, out))
                if made.kind == "8 bit":
                    values = stored[n, rows].astype(np.float32)
                else:
                    values = _PAIRS[stored[n, rows]].reshape(rows.stop - rows.start, inside)
                with np.errstate(all="ignore"):  # non-finite results are refused by the caller
                    values *= _spread(scales[n], made.share, rows, values.shape)
                yield n, rows, values

    def _scales(self, made: Quantised) -> np.ndarray:
        """Return all scales of a weight as [matrices, rows, columns], float32."""
        found = super().array(made.scale)
        lead, (_, down), (out, inside) = prod(made.shape[:-2]), made.share, made.shape[-2:]
        if made.kind == "mxfp4":
            exponents = found.view(np.uint8).astype(np.int32) - 127
            values = np.where(exponents == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
        else:
            values = found.astype(np.float32)
        if made.share == (0, 0):
            values = np.broadcast_to(values.reshape(-1, 1, 1), (lead, 1, 1))
        elif not down:
            values = values.reshape(lead, out, 1)
        else:
            values = values.reshape(lead, -1, -(-inside // down))
        if made.whole is not None:
            whole = super().array(made.whole).astype(np.float32).reshape(-1, 1, 1)
            with np.errstate(all="ignore"):
                values = values / whole if made.divides else values * whole
        return np.asarray(values, np.float32)

    def check_scales(self) -> None:
        """Check every scale.

        Raises:
            GdnError: A scale is NaN, infinite or negative, or it is zero and multiplies a number that is not zero.
        """
        for made in self.quantised.values():
            for name in made.parts[1:]:
                if made.kind == "mxfp4":  # the scales are exponents; 255 stands for NaN
                    values = np.where(super().array(name).view(np.uint8) == 255, np.nan, 1.0)
                else:
                    values = np.asarray(super().array(name), np.float32)
                wrong = ~(np.isfinite(values) & (values > 0))
                if not wrong.any():
                    continue
                if name == made.scale and (values[wrong] == 0).all() and self._all_zero(made):
                    continue
                first = tuple(int(n) for n in np.argwhere(wrong)[0]) if values.ndim else ()
                raise GdnError(
                    f"{name} has {int(wrong.sum())} bad scales of {values.size}, the first at {list(first)}: "
                    f"{float(values[first])}; a scale must be positive and finite."
                )
            self.release()

    def _all_zero(self, made: Quantised) -> bool:
        """Whether every number whose scale is zero is itself zero."""
        out, inside = made.shape[-2:]
        stored = super().array(made.stored)
        stored = stored.reshape(-1, out, stored.shape[-1])
        zero = self._scales(made) == 0
        for n in range(stored.shape[0]):
            values = stored[n].astype(np.float32) if made.kind == "8 bit" else _PAIRS[stored[n]].reshape(out, inside)
            if (values[_spread(zero[n], made.share, slice(0, out), values.shape)] != 0).any():
                return False
        return True

    def notes(self) -> tuple[str, ...]:
        """Return sentences about what is dequantised and what is left out."""
        kinds: dict[str, int] = {}
        for made in self.quantised.values():
            kinds[made.scheme] = kinds.get(made.scheme, 0) + 1
        what = "; ".join(f"{count} in {scheme}" for scheme, count in kinds.items())
        found = [f"{len(self.quantised)} weights are dequantised ({what}); there is no way back from them"]
        if self.left_out:
            first = {why: name for name, why in reversed(self.left_out.items())}
            every = list(self.left_out.values())
            counts = [f"{every.count(why)} of {why} ({name}, ...)" for why, name in first.items()]
            found.append(f"left out, since bfloat16 needs none of them: {'; '.join(counts)}")
        return tuple(found)


def _spread(scales: np.ndarray, share: tuple[int, int], rows: slice, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scales of one matrix, repeated so that they match these rows of its values."""
    if share == (0, 0):
        return np.broadcast_to(scales, shape)
    across, down = share
    first, last = rows.start // across, -(-rows.stop // across)
    found = np.repeat(scales[first:last], across, 0) if across > 1 else scales[first:last]
    found = found[rows.start - first * across :][: shape[0]]
    return np.broadcast_to(found if not down else np.repeat(found, down, 1)[:, : shape[1]], shape)
