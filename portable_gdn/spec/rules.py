"""The rules of a call: which operands, shapes and dtypes may go together. No other module checks them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from .checks import dtype, expect, rank, shape_of
from .errors import GdnError, bad
from .norm import ACTIVATIONS
from .operands import GATES
from .precision import PRECISIONS
from .problem import ConvKind, Meta, NormKind, Options, Signature
from .slots import batch_rows, pool_kind
from .variants import Granularity, Variant

__all__ = ["check_boundaries", "make_signature"]


def make_signature(library: str, device: str, meta: Mapping[str, Meta], options: Options) -> Signature:
    """Check a call, and return its signature.

    Args:
        library: "numpy", "torch" or "jax".
        device: the platform of the operands, or "traced".
        meta: the metadata of each operand that is not None.
        options: the options of the call.

    Raises:
        GdnError: the call breaks a rule; the message describes the first one that it breaks.
    """
    _check_options(options)
    tokens = "T" if options.update else "B" if options.step else "B, T"
    conv = None
    if "conv_weight" in meta:
        conv, lead, (H, HV, K, V), inputs = _mixer_dims(meta, options, tokens)
    else:
        lead, (H, HV, K, V), inputs = _rule_dims(meta, tokens)
    B, T = lead if len(lead) == 2 else (1, *lead) if options.update else (*lead, 1)

    groups, decay = _decay(meta, (*lead, HV), K, f"[{tokens}, HV")
    erase, write = _write_gates(meta, (*lead, HV), K, V, f"[{tokens}, HV")
    N = batch_rows(meta) if options.update else _sequences(meta, B, T, options.step)
    _gate_parameters(meta, options, HV, groups)
    _initial_state(meta, options, (N, HV, K, V))
    if "conv_state" in meta:
        assert conv is not None
        expect(meta, "conv_state", (N, conv.width - 1, conv.channels), "[N, W - 1, channels]")
        dtype(meta, "conv_state")
    _output_norm(meta, options.norm, (*lead, HV, V), f"[{tokens}, HV")
    if K < 1 or V < 1 or H < 1 or HV < 1:
        raise GdnError(
            f"q, k, v have no heads or channels (H = {H}, HV = {HV}, K = {K}, V = {V}); each must be at least 1."
        )
    precision = options.precision or ("highest" if inputs == "float32" else "default")
    signature = Signature(
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
        dtype=inputs,
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
    if options.update is None:
        return signature
    return replace(signature, update=pool_kind(signature, options.update, meta))


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


def _rule_dims(meta: Mapping[str, Meta], tokens: str) -> tuple[tuple[int, ...], tuple[int, int, int, int], str]:
    """Return the sizes of the leading axes, which ``tokens`` names; H, HV, K and V; and the dtype of q, k and v."""
    form = f"[{tokens}, H, K]"
    q = rank(meta, "q", form)
    expect(meta, "k", tuple(q), form + " like q")
    v = rank(meta, "v", form.replace("H, K", "HV, V"))
    if v[:-2] != q[:-2]:
        raise bad(
            "v",
            f"of shape {shape_of(v)}",
            f"agree with q in all but heads and channels, {shape_of((*q[:-2],))[:-1]}, HV, V]",
        )
    H, HV = q[-2], v[-2]
    if H and HV % H:
        raise bad("v", f"of {HV} heads", f"have a multiple of the {H} heads of q and k")
    return tuple(q[:-2]), (H, HV, q[-1], v[-1]), _common_dtype(meta, ("q", "k", "v"))


def _common_dtype(meta: Mapping[str, Meta], names: tuple[str, ...]) -> str:
    dtype(meta, *names)
    common = meta[names[0]].dtype
    for name in names[1:]:
        if meta[name].dtype != common:
            raise bad(name, f"of dtype {meta[name].dtype}", f"have the dtype of {names[0]}, {common}")
    return common


def _mixer_dims(
    meta: Mapping[str, Meta], options: Options, tokens: str
) -> tuple[ConvKind, tuple[int, ...], tuple[int, int, int, int], str]:
    """Return the convolution and the results of ``_rule_dims`` for a mixer call, whose q, k and v come as channels."""
    axes = len(tokens.split(", "))
    fused = "qkv" in meta
    H = options.num_heads
    if not isinstance(H, int) or H < 1:
        raise bad("num_heads", repr(H), "be the number of key heads, a positive integer")
    gates = [name for name in GATES if name in meta]
    if not gates:
        raise GdnError("g, beta, erase and write are all None; a mixer call needs one of them to know its value heads.")
    if len(meta[gates[0]].shape) <= axes:
        raise bad(
            gates[0],
            f"of shape {shape_of(meta[gates[0]].shape)}",
            f"have at least {axes + 1} dimensions, [{tokens}, HV]",
        )
    HV = meta[gates[0]].shape[axes]
    if HV < 1 or HV % H:
        raise bad(gates[0], f"for {HV} value heads", f"have a positive multiple of num_heads = {H} of them")
    if fused:
        *lead, channels = rank(meta, "qkv", f"[{tokens}, channels]")
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
        *lead, width = rank(meta, "q", f"[{tokens}, H * K]")
        expect(meta, "k", (*lead, width), f"[{tokens}, H * K] like q")
        *before, values = rank(meta, "v", f"[{tokens}, HV * V]")
        if before != lead:
            raise bad(
                "v",
                f"of shape {shape_of((*before, values))}",
                f"agree with q in all but channels, {shape_of(tuple(lead))[:-1]}, HV * V]",
            )
        if width % H or values % HV or not width or not values:
            raise GdnError(
                f"q has {width} and v {values} channels; "
                f"they must be positive multiples of num_heads = {H} and HV = {HV}."
            )
        K, V = width // H, values // HV
        if options.key_dim not in (None, K):
            raise bad("key_dim", repr(options.key_dim), f"be None or {K}, the channels of q divided by num_heads")
        channels = 2 * width + values
    inputs = _common_dtype(meta, ("qkv",) if fused else ("q", "k", "v"))
    weight = meta["conv_weight"].shape
    if len(weight) not in (2, 3) or (len(weight) == 3 and weight[1] != 1) or weight[0] != channels or weight[-1] < 1:
        raise bad(
            "conv.weight",
            f"of shape {shape_of(weight)}",
            f"have shape [channels, W] = [{channels}, W] with W >= 1, or [channels, 1, W]",
        )
    if "conv_bias" in meta:
        expect(meta, "conv_bias", (channels,), "[channels]")
    dtype(meta, "conv_weight", "conv_bias")
    if options.conv_activation not in (None, "silu"):
        raise bad("conv.activation", repr(options.conv_activation), "be 'silu' or None")
    return ConvKind(weight[-1], options.conv_activation, fused, channels), tuple(lead), (H, HV, K, V), inputs


def _decay(meta: Mapping[str, Meta], lead: tuple[int, ...], K: int, form: str) -> tuple[int, Granularity]:
    if "g" not in meta:
        return 0, Granularity.NONE
    dtype(meta, "g")
    shape = meta["g"].shape
    if len(shape) not in (len(lead), len(lead) + 1):
        raise bad("g", f"of shape {shape_of(shape)}", f"have shape {form}], {form}, n] or {form}, K]")
    if shape[: len(lead)] != lead:
        raise bad("g", f"of shape {shape_of(shape)}", f"begin with {form}] = {shape_of(lead)}")
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
        dtype(meta, "beta")
        expect(meta, "beta", lead, form + "]")
        return Granularity.HEAD, Granularity.HEAD
    found = []
    for name, channels, letter in (("erase", K, "K"), ("write", V, "V")):
        if name not in meta:
            found.append(Granularity.NONE)
            continue
        dtype(meta, name)
        shape = tuple(meta[name].shape)
        if shape not in (lead, (*lead, channels)):
            raise bad(
                name,
                f"of shape {shape_of(shape)}",
                f"have shape {form}, {letter}] = {shape_of((*lead, channels))} or {form}] = {shape_of(lead)}",
            )
        found.append(Granularity.HEAD if shape == lead else Granularity.CHANNEL)
    return found[0], found[1]


def _sequences(meta: Mapping[str, Meta], B: int, T: int, step: bool) -> int:
    """Return the number of states N, after checking the layout of the sequences."""
    if step:
        return B
    if "segment_ids" in meta:
        if "cu_seqlens" in meta:
            raise GdnError("cu_seqlens and segment_ids are both given; give one of them.")
        dtype(meta, "segment_ids")
        expect(meta, "segment_ids", (B, T), "[B, T]")
    if "mask" in meta:
        dtype(meta, "mask")
        expect(meta, "mask", (B, T), "[B, T]")
    if "cu_seqlens" not in meta:
        return B
    shape = rank(meta, "cu_seqlens", "[N + 1]")
    dtype(meta, "cu_seqlens")
    if B != 1:
        raise bad("cu_seqlens", f"given for B = {B} rows", "come with B = 1: packed sequences share one row")
    if shape[0] < 2:
        raise bad("cu_seqlens", f"of shape {shape_of(shape)}", "hold N + 1 >= 2 boundaries")
    return shape[0] - 1


def _gate_parameters(meta: Mapping[str, Meta], options: Options, HV: int, groups: int) -> None:
    dtype(meta, "A_log", "dt_bias")
    if options.gate is None:
        return
    if "g" not in meta:
        raise bad("g", "None", "be the raw projection that the gate activates")
    if "A_log" in meta:
        expect(meta, "A_log", (HV,), "[HV]")
    elif options.gate.lower_bound is None:
        raise bad("gate.A_log", "None", "be an array [HV]")
    if "dt_bias" in meta:
        shape = tuple(meta["dt_bias"].shape)
        allowed = {(HV * groups,), (HV, groups)}
        if shape not in allowed:
            raise bad(
                "gate.dt_bias",
                f"of shape {shape_of(shape)}",
                f"have shape [HV * n] = [{HV * groups}] or [HV, n] = [{HV}, {groups}]",
            )


def _output_norm(meta: Mapping[str, Meta], norm: NormKind | None, shape: tuple[int, ...], form: str) -> None:
    """Check the norm's parameters and its gate against the shape of the output."""
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
            raise bad("output_norm.weight", f"of shape {shape_of(given)}", f"have shape [V] = [{V}]")
    if "z" in meta:
        given = tuple(meta["z"].shape)
        if given not in (shape, (*lead, HV * V)):
            raise bad(
                "z",
                f"of shape {shape_of(given)}",
                f"have shape {form}, V] = {shape_of(shape)} or {form} * V] = {shape_of((*lead, HV * V))}",
            )
    dtype(meta, "z", "norm_weight")


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
        f"of shape {shape_of(given.shape)}{hint}",
        f"have shape {form} = {shape_of(want)} for state_layout={options.state_layout!r}",
    )


def check_boundaries(cu_seqlens: Any, T: int) -> None:
    """Check boundaries on the host (a list of integers): they must begin at 0, never decrease, and end at T.

    Raises:
        GdnError: they do not.
    """
    if cu_seqlens[0] != 0:
        raise bad("cu_seqlens", f"starting at {cu_seqlens[0]}", "start at 0")
    for i, (a, b) in enumerate(pairwise(cu_seqlens)):
        if b < a:
            raise bad("cu_seqlens", f"decreasing from {a} to {b} at entry {i + 1}", "never decrease")
    if cu_seqlens[-1] != T:
        raise bad("cu_seqlens", f"ending at {cu_seqlens[-1]}", f"end at T = {T}")
