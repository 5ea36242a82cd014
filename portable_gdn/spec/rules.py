"""The rules of a call: which operands, shapes and dtypes go together. All of them are here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from .errors import GdnError, bad
from .norm import ACTIVATIONS
from .operands import GATES, OPERANDS
from .precision import PRECISIONS
from .problem import ConvKind, Meta, NormKind, Options, Signature
from .variants import Granularity, Variant

__all__ = ["check_boundaries", "make_signature"]


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def _expect(meta: Mapping[str, Meta], name: str, shape: tuple[int, ...], form: str) -> None:
    given = meta[name].shape
    if tuple(given) != shape:
        raise bad(name, f"of shape {_shape(given)}", f"have shape {form} = {_shape(shape)}")


def _rank(meta: Mapping[str, Meta], name: str, form: str) -> tuple[int, ...]:
    shape = meta[name].shape
    if len(shape) != form.count(",") + 1:
        raise bad(name, f"of shape {_shape(shape)}", f"have {form.count(',') + 1} dimensions, {form}")
    return shape


def _dtype(meta: Mapping[str, Meta], *names: str) -> None:
    for name in names:
        allowed = OPERANDS[name].dtypes
        if name in meta and meta[name].dtype not in allowed:
            raise bad(name, f"of dtype {meta[name].dtype}", f"be one of {', '.join(allowed)}")


def make_signature(library: str, device: str, meta: Mapping[str, Meta], options: Options) -> Signature:
    """Check a call and describe it.

    Args:
        library: "numpy", "torch" or "jax".
        device: platform of the operands, or "traced".
        meta: what is known of each operand that is not None.
        options: the rest of the call.

    Raises:
        GdnError: the first rule that does not hold.
    """
    _check_options(options)
    token = "" if options.step else "T, "
    conv = None
    if "conv_weight" in meta:
        conv, (B, T, H, HV, K, V), dtype = _mixer_dims(meta, options)
    else:
        (B, T, H, HV, K, V), dtype = _rule_dims(meta, options.step)
    time = () if options.step else (T,)

    groups, decay = _decay(meta, (B, *time, HV), K, f"[B, {token}HV")
    erase, write = _write_gates(meta, (B, *time, HV), K, V, f"[B, {token}HV")
    N = _sequences(meta, B, T, options.step)
    _gate_parameters(meta, options, HV, groups)
    _initial_state(meta, options, (N, HV, K, V))
    if "conv_state" in meta:
        assert conv is not None
        _expect(meta, "conv_state", (N, conv.width - 1, conv.channels), "[N, W - 1, channels]")
        _dtype(meta, "conv_state")
    _output_norm(meta, options.norm, (B, *time, HV, V), f"[B, {token}HV")
    if K < 1 or V < 1 or H < 1 or HV < 1:
        raise GdnError(
            f"q, k, v have no heads or channels (H = {H}, HV = {HV}, K = {K}, V = {V}); each must be at least 1."
        )
    precision = options.precision or ("highest" if dtype == "float32" else "default")
    return Signature(
        library=library,
        device=device,
        operands=tuple(meta),
        B=B,
        T=T,
        N=N,
        H=H,
        HV=HV,
        K=K,
        V=V,
        groups=groups,
        dtype=dtype,
        variant=Variant(decay, erase, write),
        scale=K**-0.5 if options.scale is None else float(options.scale),
        output_final_state=bool(options.output_final_state),
        qk_l2norm=bool(options.qk_l2norm),
        gate=options.gate,
        chunk_size=options.chunk_size,
        precision=precision,
        state_layout=options.state_layout,
        deterministic=bool(options.deterministic),
        step=options.step,
        conv=conv,
        norm=options.norm,
    )


def _check_options(options: Options) -> None:
    for name in ("output_final_state", "qk_l2norm", "deterministic"):
        value = getattr(options, name)
        if not isinstance(value, (bool, np.bool_)):
            raise bad(name, repr(value), "be True or False")
    if options.precision not in (None, *PRECISIONS):
        raise bad("precision", repr(options.precision), f"be None or one of {', '.join(map(repr, PRECISIONS))}")
    if options.state_layout not in ("kv", "vk"):
        raise bad("state_layout", repr(options.state_layout), "be 'kv' (state [N, HV, K, V]) or 'vk' ([N, HV, V, K])")
    size = options.chunk_size
    if size is not None and (not isinstance(size, int) or not 16 <= size <= 256 or size & (size - 1)):
        raise bad("chunk_size", repr(size), "be None or a power of two from 16 to 256")
    if options.scale is not None and not (isinstance(options.scale, Real) and abs(options.scale) < math.inf):
        raise bad("scale", repr(options.scale), "be None (K ** -0.5) or a finite number")
    bound = None if options.gate is None else options.gate.lower_bound
    if bound is not None and not (isinstance(bound, Real) and -5 <= bound < 0):
        raise bad("gate.lower_bound", repr(bound), "lie in [-5, 0)")


def _rule_dims(meta: Mapping[str, Meta], step: bool) -> tuple[tuple[int, int, int, int, int, int], str]:
    form = "[B, H, K]" if step else "[B, T, H, K]"
    q = _rank(meta, "q", form)
    _expect(meta, "k", tuple(q), form + " like q")
    v = _rank(meta, "v", form.replace("H, K", "HV, V"))
    if v[:-2] != q[:-2]:
        raise bad(
            "v",
            f"of shape {_shape(v)}",
            f"agree with q in all but heads and channels, {_shape((*q[:-2],))[:-1]}, HV, V]",
        )
    H, HV = q[-2], v[-2]
    if H and HV % H:
        raise bad("v", f"of {HV} heads", f"have a multiple of the {H} heads of q and k")
    dtype = _common_dtype(meta, ("q", "k", "v"))
    return (q[0], 1 if step else q[1], H, HV, q[-1], v[-1]), dtype


def _common_dtype(meta: Mapping[str, Meta], names: tuple[str, ...]) -> str:
    _dtype(meta, *names)
    dtype = meta[names[0]].dtype
    for name in names[1:]:
        if meta[name].dtype != dtype:
            raise bad(name, f"of dtype {meta[name].dtype}", f"have the dtype of {names[0]}, {dtype}")
    return dtype


def _mixer_dims(
    meta: Mapping[str, Meta], options: Options
) -> tuple[ConvKind, tuple[int, int, int, int, int, int], str]:
    """Dimensions of a mixer call, whose q, k, v are channels before the convolution."""
    fused = "qkv" in meta
    H = options.num_heads
    if not isinstance(H, int) or H < 1:
        raise bad("num_heads", repr(H), "be the number of key heads, a positive integer")
    gates = [name for name in GATES if name in meta]
    if not gates:
        raise GdnError("g, beta, erase and write are all None; a mixer call needs one of them to know its value heads.")
    lead, token = (1, "") if options.step else (2, "T, ")  # axes before the heads
    if len(meta[gates[0]].shape) <= lead:
        form = f"have at least {lead + 1} dimensions, [B, {token}HV]"
        raise bad(gates[0], f"of shape {_shape(meta[gates[0]].shape)}", form)
    HV = meta[gates[0]].shape[lead]
    if HV < 1 or HV % H:
        raise bad(gates[0], f"for {HV} value heads", f"have a positive multiple of num_heads = {H} of them")
    if fused:
        B, *time, channels = _rank(meta, "qkv", f"[B, {token}channels]")
        K = options.key_dim
        if not isinstance(K, int) or K < 1:
            raise bad(
                "key_dim", repr(K), "be the channels of a key head, a positive integer, when q | k | v is one array"
            )
        rest = channels - 2 * H * K
        if rest < HV or rest % HV:
            raise bad(
                "qkv", f"of {channels} channels", f"have 2 num_heads key_dim + HV V of them, 2 * {H} * {K} + {HV} V"
            )
        V = rest // HV
    else:
        B, *time, width = _rank(meta, "q", f"[B, {token}H * K]")
        _expect(meta, "k", (B, *time, width), f"[B, {token}H * K] like q")
        v = _rank(meta, "v", f"[B, {token}HV * V]")
        if tuple(v[:-1]) != (B, *time):
            raise bad(
                "v", f"of shape {_shape(v)}", f"agree with q in all but channels, {_shape((B, *time))[:-1]}, HV * V]"
            )
        if width % H or v[-1] % HV or not width or not v[-1]:
            raise GdnError(
                f"q has {width} and v {v[-1]} channels; "
                f"they must be positive multiples of num_heads = {H} and HV = {HV}."
            )
        K, V = width // H, v[-1] // HV
        if options.key_dim not in (None, K):
            raise bad("key_dim", repr(options.key_dim), f"be None or {K}, the channels of q divided by num_heads")
        channels = 2 * width + v[-1]
    dtype = _common_dtype(meta, ("qkv",) if fused else ("q", "k", "v"))
    weight = meta["conv_weight"].shape
    if len(weight) not in (2, 3) or (len(weight) == 3 and weight[1] != 1) or weight[0] != channels or weight[-1] < 1:
        raise bad(
            "conv.weight",
            f"of shape {_shape(weight)}",
            f"have shape [channels, W] = [{channels}, W] with W >= 1, or [channels, 1, W]",
        )
    if "conv_bias" in meta:
        _expect(meta, "conv_bias", (channels,), "[channels]")
    _dtype(meta, "conv_weight", "conv_bias")
    if options.conv_activation not in (None, "silu"):
        raise bad("conv.activation", repr(options.conv_activation), "be 'silu' or None")
    T = time[0] if time else 1
    return ConvKind(weight[-1], options.conv_activation, fused, channels), (B, T, H, HV, K, V), dtype


def _decay(meta: Mapping[str, Meta], lead: tuple[int, ...], K: int, form: str) -> tuple[int, Granularity]:
    if "g" not in meta:
        return 0, Granularity.NONE
    _dtype(meta, "g")
    shape = meta["g"].shape
    if len(shape) not in (len(lead), len(lead) + 1):
        raise bad("g", f"of shape {_shape(shape)}", f"have shape {form}], {form}, n] or {form}, K]")
    if shape[: len(lead)] != lead:
        raise bad("g", f"of shape {_shape(shape)}", f"begin with {form}] = {_shape(lead)}")
    n = 1 if len(shape) == len(lead) else shape[-1]
    if n < 1 or K % n:
        raise bad("g", f"of {n} decays a head", f"have a number of them that divides K = {K}")
    if n == 1:
        return 1, Granularity.HEAD
    return n, Granularity.CHANNEL if n == K else Granularity.GROUP


def _write_gates(
    meta: Mapping[str, Meta], lead: tuple[int, ...], K: int, V: int, form: str
) -> tuple[Granularity, Granularity]:
    if "beta" in meta:
        for other in ("erase", "write"):
            if other in meta:
                raise GdnError(f"beta and {other} are both given; give beta alone, or erase and write without beta.")
        _dtype(meta, "beta")
        _expect(meta, "beta", lead, form + "]")
        return Granularity.HEAD, Granularity.HEAD
    found = []
    for name, channels, letter in (("erase", K, "K"), ("write", V, "V")):
        if name not in meta:
            found.append(Granularity.NONE)
            continue
        _dtype(meta, name)
        shape = tuple(meta[name].shape)
        if shape not in (lead, (*lead, channels)):
            raise bad(
                name,
                f"of shape {_shape(shape)}",
                f"have shape {form}, {letter}] = {_shape((*lead, channels))} or {form}] = {_shape(lead)}",
            )
        found.append(Granularity.HEAD if shape == lead else Granularity.CHANNEL)
    return found[0], found[1]


def _sequences(meta: Mapping[str, Meta], B: int, T: int, step: bool) -> int:
    """Number of states N, after checking how sequences are laid out."""
    if step:
        return B
    if "segment_ids" in meta:
        if "cu_seqlens" in meta:
            raise GdnError("cu_seqlens and segment_ids are both given; give one of them.")
        _dtype(meta, "segment_ids")
        _expect(meta, "segment_ids", (B, T), "[B, T]")
    if "mask" in meta:
        _dtype(meta, "mask")
        _expect(meta, "mask", (B, T), "[B, T]")
    if "cu_seqlens" not in meta:
        return B
    shape = _rank(meta, "cu_seqlens", "[N + 1]")
    _dtype(meta, "cu_seqlens")
    if B != 1:
        raise bad("cu_seqlens", f"given for B = {B} rows", "come with B = 1: packed sequences share one row")
    if shape[0] < 2:
        raise bad("cu_seqlens", f"of shape {_shape(shape)}", "hold N + 1 >= 2 boundaries")
    return shape[0] - 1


def _gate_parameters(meta: Mapping[str, Meta], options: Options, HV: int, groups: int) -> None:
    _dtype(meta, "A_log", "dt_bias")
    if options.gate is None:
        return
    if "g" not in meta:
        raise bad("g", "None", "be the raw projection that the gate activates")
    if "A_log" in meta:
        _expect(meta, "A_log", (HV,), "[HV]")
    elif options.gate.lower_bound is None:
        raise bad("gate.A_log", "None", "be an array [HV]")
    if "dt_bias" in meta:
        shape = tuple(meta["dt_bias"].shape)
        allowed = {(HV * groups,), (HV, groups)}
        if shape not in allowed:
            raise bad(
                "gate.dt_bias",
                f"of shape {_shape(shape)}",
                f"have shape [HV * n] = [{HV * groups}] or [HV, n] = [{HV}, {groups}]",
            )


def _output_norm(meta: Mapping[str, Meta], norm: NormKind | None, shape: tuple[int, ...], form: str) -> None:
    """The norm's parameters and its gate, against the shape of the output."""
    *lead, HV, V = shape
    if norm is None:
        if "z" in meta:
            raise bad("z", "given without output_norm", "come with output_norm=portable_gdn.GatedRMSNorm(...)")
        return
    if not isinstance(norm.eps, Real) or not 0 < norm.eps < math.inf:
        raise bad("output_norm.eps", repr(norm.eps), "be a finite number above 0")
    if norm.activation not in (None, *ACTIVATIONS):
        raise bad("output_norm.activation", repr(norm.activation), "be None, 'silu' or 'sigmoid'")
    if norm.activation is None and "z" in meta:
        raise bad("z", "given with output_norm.activation None", "be left out of a norm without a gate")
    if norm.activation is not None and "z" not in meta:
        raise bad(
            "z",
            f"None with output_norm.activation {norm.activation!r}",
            f"be an array {form}, V]; a norm without a gate has activation None",
        )
    if "norm_weight" in meta:
        given = tuple(meta["norm_weight"].shape)
        if given != (V,):
            raise bad("output_norm.weight", f"of shape {_shape(given)}", f"have shape [V] = [{V}]")
    if "z" in meta:
        given = tuple(meta["z"].shape)
        if given not in (shape, (*lead, HV * V)):
            raise bad(
                "z",
                f"of shape {_shape(given)}",
                f"have shape {form}, V] = {_shape(shape)} or {form} * V] = {_shape((*lead, HV * V))}",
            )
    _dtype(meta, "z", "norm_weight")


def _initial_state(meta: Mapping[str, Meta], options: Options, dims: tuple[int, int, int, int]) -> None:
    name = "state" if options.step else "initial_state"
    if "initial_state" not in meta:
        return
    given = meta["initial_state"]
    if given.dtype != "float32":
        raise bad(name, f"of dtype {given.dtype}", "be float32, in which states are kept")
    N, HV, K, V = dims
    layouts = {"kv": (N, HV, K, V), "vk": (N, HV, V, K)}
    want = layouts.pop(options.state_layout)
    if tuple(given.shape) == want:
        return
    ((other, shape),) = layouts.items()
    form = "[N, HV, K, V]" if options.state_layout == "kv" else "[N, HV, V, K]"
    hint = f" (it looks like state_layout={other!r})" if tuple(given.shape) == shape else ""
    raise bad(
        name,
        f"of shape {_shape(given.shape)}{hint}",
        f"have shape {form} = {_shape(want)} for state_layout={options.state_layout!r}",
    )


def check_boundaries(cu_seqlens: Any, T: int) -> None:
    """Check boundaries that lie on the host (a list of integers): from 0, never decreasing, to T."""
    if cu_seqlens[0] != 0:
        raise bad("cu_seqlens", f"starting at {cu_seqlens[0]}", "start at 0")
    for i, (a, b) in enumerate(pairwise(cu_seqlens)):
        if b < a:
            raise bad("cu_seqlens", f"decreasing from {a} to {b} at entry {i + 1}", "never decrease")
    if cu_seqlens[-1] != T:
        raise bad("cu_seqlens", f"ending at {cu_seqlens[-1]}", f"end at T = {T}")
