"""A whole call in numpy, forward and backward: separate sequences, convolution, norm, gates and the rule.

This module computes everything around the rule in the dtype asked for. The rule itself is an argument (``CoreRule``):
the oracle token by token, or the stages chunk by chunk (``chunk_by_chunk``), exact or with operands rounded as
declared. Sequences are computed one at a time, so that nothing can leak from one into another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import array_api_compat.numpy as xp
import numpy as np

from . import chunkwise
from .gates import activate_gate, gate_vjp, l2norm, l2norm_vjp, sigmoid
from .norm import gated_norm, gated_norm_vjp
from .norm_sizes import NormSizes, norm_sizes
from .operands import DIFFERENTIABLE, PER_TOKEN, one_token
from .oracle import Core, CoreGradients, CoreResult, CoreRule, OutputCotangent, output_cotangent, token_by_token
from .problem import Problem, Signature
from .stages import Algebra, Decays, Product, decay

__all__ = [
    "FLOAT64", "AnotherOrder", "Evaluation", "PowersOf2", "chunk_by_chunk", "decay_base2", "evaluate",
    "matmul",
]  # fmt: skip


class Evaluation(NamedTuple):
    """The results of one call, unrounded and in the caller's layout.

    ``gradients`` has the names of operands as keys. ``sizes`` holds the sizes of each tensor's summands (only the
    oracle computes them); its keys are the names of operands, "o" and "state".
    """

    o: np.ndarray
    state: np.ndarray
    conv_state: np.ndarray | None
    gradients: dict[str, np.ndarray]
    sizes: dict[str, np.ndarray]


class _Piece(NamedTuple):
    """The valid tokens of one segment: its row, their places, its initial state, and whether it ends a sequence."""

    row: int
    tokens: np.ndarray
    state: int
    fresh: bool
    last: bool


def matmul(a: np.ndarray, b: np.ndarray, name_a: str, name_b: str) -> np.ndarray:
    """The plain product."""
    return a @ b


def _pieces(s: Signature, x: Mapping[str, Any]) -> list[_Piece]:
    mask = np.asarray(x["mask"]) if s.has("mask") else np.ones((s.B, s.T), bool)
    pieces = []
    if s.packed:
        bounds = [int(n) for n in np.asarray(x["cu_seqlens"])]
        for n in range(s.N):
            tokens = np.arange(bounds[n], bounds[n + 1])
            pieces.append(_Piece(0, tokens[mask[0, tokens]], n, False, True))
        return pieces
    for row in range(s.B):
        tokens = np.flatnonzero(mask[row])
        cuts = np.zeros(0, int)
        if s.has("segment_ids"):
            ids = np.asarray(x["segment_ids"])[row, tokens]
            cuts = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        parts = np.split(tokens, cuts)
        pieces += [_Piece(row, part, row, i > 0, i == len(parts) - 1) for i, part in enumerate(parts)]
    return pieces


def evaluate(
    problem: Problem,
    cotangents: Mapping[str, Any] | None = None,
    rule: CoreRule = token_by_token,
    dtype: Any = np.float64,
    stored: Callable[[np.ndarray, str], np.ndarray] = lambda x, name: x,
) -> Evaluation:
    """Compute a call, and its gradients if cotangents of "o" and "state" are given.

    Args:
        problem: the call, with operands as numpy arrays of any float dtype, which are only read.
        cotangents: the cotangents of "o" and "state" in the caller's layout; a missing one is zeros.
        rule: computes one sequence.
        dtype: the dtype of the whole computation, float64 or float32.
        stored: rounds the rule's output as a backend stores it for a norm ("o") or for its backward pass ("o_kept").
    """
    s = problem.signature
    raw = problem.operands
    x = {name: np.asarray(a).astype(dtype) for name, a in raw.items() if name in DIFFERENTIABLE}
    if s.step:
        x = one_token(x)
    if s.conv is not None:
        x["conv_weight"] = x["conv_weight"].reshape(s.conv.channels, s.conv.width)
    swap = (lambda a: np.swapaxes(a, -1, -2)) if s.state_layout == "vk" else (lambda a: a)
    S0 = swap(x["initial_state"]) if "initial_state" in x else np.zeros((s.N, s.HV, s.K, s.V), dtype)
    o = np.zeros((s.B, s.T, s.HV, s.V), dtype)
    state, o_size, state_size = S0.copy(), np.zeros_like(o), np.abs(S0)
    conv_state = None
    if s.conv is not None:
        conv_state = np.zeros((s.N, s.conv.width - 1, s.conv.channels), dtype)
        if "conv_state" in x:
            conv_state = x["conv_state"].copy()
    want = cotangents is not None
    dO = dS = None
    grads: dict[str, np.ndarray] = {}
    sizes: dict[str, np.ndarray] = {}
    if cotangents is not None:
        dO = np.asarray(cotangents["o"]).astype(dtype) if "o" in cotangents else np.zeros_like(o)
        dO = dO.reshape(o.shape)
        dS = swap(np.asarray(cotangents["state"]).astype(dtype)) if "state" in cotangents else np.zeros_like(S0)
        grads = {name: np.zeros_like(a) for name, a in x.items()}
        if "initial_state" in x:
            grads["initial_state"] = np.zeros_like(S0)
        sizes = {name: np.zeros_like(a) for name, a in grads.items()}
    for p in _pieces(s, raw):
        before = _Prologue(s, x, p)
        start = np.zeros_like(S0[p.state]) if p.fresh else S0[p.state]
        core = before.core(start)
        dy, end = None, None
        if want:
            dy = _heads_first(s, dO[p.row, p.tokens])
            end = (dS[p.state] if p.last else np.zeros_like(start)).reshape(s.H, -1, s.K, s.V)
        behind = None if s.norm is None else _Epilogue(s, x, p, dy, stored)
        r = rule(core, s.scale, dy if behind is None or dy is None else behind.cotangent, end)
        if behind is not None:
            r = behind.result(r, core, rule, s.scale)
            if want:
                behind.gradients(grads, sizes)
        o[p.row, p.tokens] = _tokens_first(r.o)
        if r.o_size is not None:
            o_size[p.row, p.tokens] = _tokens_first(r.o_size)
        if p.last:
            state[p.state] = r.S.reshape(start.shape)
            state_size[p.state] = (np.abs(r.S) if r.S_size is None else r.S_size).reshape(start.shape)
            if conv_state is not None:
                conv_state[p.state] = before.conv_state
        if want:
            before.gradients(r.gradients, grads, r.gradient_sizes, sizes)
    sizes["o"], sizes["state"] = o_size, swap(state_size)
    if "initial_state" in grads:
        grads["initial_state"], sizes["initial_state"] = swap(grads["initial_state"]), swap(sizes["initial_state"])
    if "conv_weight" in grads:
        for table in (grads, sizes):
            table["conv_weight"] = table["conv_weight"].reshape(np.shape(raw["conv_weight"]))
    if s.step:
        o, sizes["o"] = o[:, 0], sizes["o"][:, 0]
        for table in (grads, sizes):
            for name in PER_TOKEN:
                if name in table:
                    table[name] = table[name][:, 0]
    return Evaluation(o, swap(state), conv_state, grads, sizes)


def _heads_first(s: Signature, a: np.ndarray) -> np.ndarray:
    """Reshape [T, HV, D] to [H, R, T, D]."""
    return np.moveaxis(a, 0, 1).reshape(s.H, s.HV // s.H, a.shape[0], a.shape[-1])


def _tokens_first(a: np.ndarray) -> np.ndarray:
    """Reshape [H, R, T, D] to [T, H R, D]."""
    return np.moveaxis(a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), 0, 1)


class _Epilogue:
    """The steps after the rule for one piece: the norm and gate of the output, forward and backward.

    Arrays have the axes of heads first, [H, R, T, V].
    """

    def __init__(
        self,
        s: Signature,
        x: dict[str, np.ndarray],
        piece: _Piece,
        dy: np.ndarray | None,
        stored: Callable[[np.ndarray, str], np.ndarray],
    ) -> None:
        assert s.norm is not None
        self.s, self.piece, self.dy, self.stored = s, piece, dy, stored
        self.weight, self.kind = x.get("norm_weight"), s.norm
        self.z = None
        if "z" in x:
            z = x["z"][piece.row, piece.tokens]
            self.z = _heads_first(s, z.reshape(*z.shape[:1], s.HV, s.V))
        self.sizes: NormSizes | None = None
        self.found: tuple[np.ndarray, np.ndarray | None] | None = None

    def cotangent(self, o: np.ndarray, heads: slice) -> np.ndarray:
        """Return the cotangent of o for some key heads, and keep those of z and the weight."""
        assert self.dy is not None
        z = None if self.z is None else self.z[heads]
        kept = self.stored(o, "o_kept")
        dO, d_weight, dz = gated_norm_vjp(xp, kept, self.weight, z, *self.kind, self.dy[heads])
        if self.found is None:
            self.found = np.zeros_like(self.dy), None if self.z is None else np.zeros_like(self.z)
        self.found[0][heads] = d_weight
        if dz is not None:
            self.found[1][heads] = dz  # type: ignore[index]
        return dO

    def result(self, r: CoreResult, core: Core, rule: CoreRule, scale: float) -> CoreResult:
        """Return the rule's result with its output normalised, and with sizes that include the norm."""
        y = gated_norm(xp, self.stored(r.o, "o"), self.weight, self.z, *self.kind)
        if r.o_size is None:
            return r._replace(o=y)
        self.sizes = norm_sizes(r.o, r.o_size, self.weight, self.z, self.kind, self.dy)
        if self.dy is not None and r.gradient_sizes is not None and r.gradients is not None:
            # Errors of dO's summands propagate to the gradients; the backward pass is linear in dO.
            signs = np.where(np.random.Generator(np.random.Philox(0)).random(y.shape) < 0.5, -1.0, 1.0)
            assert self.sizes.dO is not None
            moved = rule(core, scale, signs * self.sizes.dO, np.zeros_like(core.S)).gradients
            assert moved is not None
            sizes = (None if a is None else a + np.abs(b) for a, b in zip(r.gradient_sizes, moved, strict=True))
            r = r._replace(gradient_sizes=CoreGradients(*sizes))
        return r._replace(o=y, o_size=self.sizes.y)

    def gradients(self, grads: dict[str, np.ndarray], sizes: dict[str, np.ndarray]) -> None:
        """Add this piece's cotangents of z and the weight, and the sizes of their summands."""
        assert self.found is not None
        tables = [(grads, *self.found)]
        if self.sizes is not None:
            assert self.sizes.weight is not None
            tables.append((sizes, self.sizes.weight, self.sizes.z))
        at = (self.piece.row, self.piece.tokens)
        for into, d_weight, dz in tables:
            if "norm_weight" in into:
                into["norm_weight"] += d_weight.sum((0, 1, 2))
            if dz is not None:
                into["z"][at] += _tokens_first(dz).reshape(into["z"][at].shape)


class _Prologue:
    """The steps before the rule for one piece: convolution, norm and gates, forward and backward."""

    def __init__(self, s: Signature, x: dict[str, np.ndarray], piece: _Piece) -> None:
        self.s, self.x, self.p = s, x, piece
        at = (piece.row, piece.tokens)
        if s.conv is None:
            self.q, self.k, self.v = x["q"][at], x["k"][at], x["v"][at]
        else:
            self.q, self.k, self.v = self._convolve(s, x, at)
        self.raw_q, self.raw_k = self.q, self.k
        if s.qk_l2norm:
            self.q, self.k = l2norm(xp, self.q), l2norm(xp, self.k)
        T = len(piece.tokens)
        lead = (T, s.HV)
        if s.has("g"):
            self.raw_g = x["g"][at].reshape(*lead, s.groups)
            self.g = self.raw_g if s.gate is None else activate_gate(xp, self.raw_g, *self._gate())
        else:
            self.g = np.zeros((*lead, 1), self.q.dtype)
        self.b, self.w = self._write_gate("erase", at, lead), self._write_gate("write", at, lead)

    def _gate(self) -> tuple[np.ndarray | None, np.ndarray | None, float | None]:
        A, bias = self.x.get("A_log"), self.x.get("dt_bias")
        return (
            None if A is None else A[:, None],
            None if bias is None else bias.reshape(self.s.HV, self.s.groups),
            self.s.gate.lower_bound,
        )

    def _write_gate(self, name: str, at: Any, lead: tuple[int, int]) -> np.ndarray | None:
        name = "beta" if self.s.has("beta") else name
        return (
            self.x[name][at].reshape(*lead, -1)
            if self.s.has(name) and lead[0]
            else (np.zeros((*lead, 1), self.q.dtype) if self.s.has(name) else None)
        )

    def core(self, start: np.ndarray) -> Core:
        """Return the rule's operands, with the axes of heads first."""
        s = self.s
        key = lambda a: np.moveaxis(a, 0, 1)[:, None]  # noqa: E731
        gate = lambda a: None if a is None else _heads_first(s, a)  # noqa: E731
        return Core(
            key(self.q),
            key(self.k),
            _heads_first(s, self.v),
            _heads_first(s, self.g),
            gate(self.b),
            gate(self.w),
            start.reshape(s.H, -1, s.K, s.V),
        )

    def _convolve(self, s: Signature, x: dict[str, np.ndarray], at: Any) -> list[np.ndarray]:
        kind = s.conv
        assert kind is not None
        channels = x["qkv"][at] if kind.fused else np.concatenate([x["q"][at], x["k"][at], x["v"][at]], -1)
        before = np.zeros((kind.width - 1, kind.channels), channels.dtype)
        if "conv_state" in x and not self.p.fresh:
            before = x["conv_state"][self.p.state]
        self.seen = np.concatenate([before, channels])  # [W - 1 + T, channels]
        T = len(channels)
        y = sum(self.seen[j : j + T] * x["conv_weight"][:, j] for j in range(kind.width))
        y = y + x["conv_bias"] if "conv_bias" in x else y
        self.linear = y
        self.conv_state = self.seen[T:]
        y = y * sigmoid(xp, y) if kind.activation == "silu" else y
        keys = s.H * s.K
        return [
            y[:, :keys].reshape(T, s.H, s.K),
            y[:, keys : 2 * keys].reshape(T, s.H, s.K),
            y[:, 2 * keys :].reshape(T, s.HV, s.V),
        ]

    def gradients(
        self, d: CoreGradients, grads: dict[str, np.ndarray], size: CoreGradients | None, sizes: dict[str, np.ndarray]
    ) -> None:
        """Add this piece's cotangents to ``grads``, and the sizes of their summands to ``sizes``."""
        self._backward(d, grads, absolute=False)
        if size is not None:
            self._backward(size, sizes, absolute=True)

    def _backward(self, d: CoreGradients, into: dict[str, np.ndarray], absolute: bool) -> None:
        s, at = self.s, (self.p.row, self.p.tokens)
        size = np.abs if absolute else (lambda a: a)
        first = lambda a: _tokens_first(a)  # noqa: E731
        dq, dk, dv = first(d.q), first(d.k), first(d.v)
        if s.qk_l2norm:
            norm = _l2norm_size if absolute else l2norm_vjp
            dq, dk = norm(xp, self.raw_q, dq), norm(xp, self.raw_k, dk)
        if s.conv is None:
            for name, value in (("q", dq), ("k", dk), ("v", dv)):
                into[name][at] += value
        else:
            flat = [a.reshape(len(a), a.shape[1] * a.shape[2]) for a in (dq, dk, dv)]
            self._conv_backward(np.concatenate(flat, -1), into, at, size)
        if s.has("g"):
            dg = first(d.g)
            if s.gate is not None:
                dx, dA = gate_vjp(xp, self.raw_g, *self._gate(), dg)
                dg, dA = size(dx), size(dA)
                if "A_log" in into:
                    into["A_log"] += dA.sum((0, 2))
                if "dt_bias" in into:
                    into["dt_bias"] += dg.sum(0).reshape(into["dt_bias"].shape)
            into["g"][at] += dg.reshape(into["g"][at].shape)
        for name, value in (("erase", d.b), ("write", d.w)):
            name = "beta" if s.has("beta") else name
            if value is not None:
                into[name][at] += first(value).reshape(into[name][at].shape)
        if "initial_state" in into and not self.p.fresh:
            into["initial_state"][self.p.state] += d.S.reshape(into["initial_state"][self.p.state].shape)

    def _conv_backward(self, dy: np.ndarray, into: dict[str, np.ndarray], at: Any, size: Any) -> None:
        s, kind = self.s, self.s.conv
        assert kind is not None
        if kind.activation == "silu":
            sig = sigmoid(xp, self.linear)
            dy = dy * size(sig * (1 + self.linear * (1 - sig)))
        T, W = len(dy), kind.width
        dseen = np.zeros_like(self.seen)
        for j in range(W):
            dseen[j : j + T] += dy * size(self.x["conv_weight"][:, j])
            into["conv_weight"][:, j] += (dy * size(self.seen[j : j + T])).sum(0)
        if "conv_bias" in into:
            into["conv_bias"] += dy.sum(0)
        if "conv_state" in into and not self.p.fresh:
            into["conv_state"][self.p.state] += dseen[: W - 1]
        dx, keys = dseen[W - 1 :], s.H * s.K
        if kind.fused:
            into["qkv"][at] += dx
        else:
            for name, part in zip("qkv", np.split(dx, [keys, 2 * keys], -1), strict=True):
                into[name][at] += part


def _l2norm_size(xp: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Compute the sizes of the summands of ``l2norm_vjp``."""
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    y = np.abs(x * r)
    return r * (dy + y * (y * dy).sum(-1, keepdims=True))


class PowersOf2:
    """The array namespace with exp2 in place of exp."""

    exp = staticmethod(np.exp2)

    def __getattr__(self, name: str) -> Any:
        return getattr(xp, name)


class _Float64:
    """The array namespace in which float32 means float64, so that code that casts to float32 computes in float64."""

    float32 = np.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(xp, name)


FLOAT64: Any = _Float64()


def decay_base2(xp: Any, g: np.ndarray, starts: np.ndarray | None = None) -> Decays:
    """Compute ``stages.decay`` with its finished sums in base 2."""
    G, count = decay(xp, g, starts)
    return Decays(G * G.dtype.type(1 / np.log(2)), count)


class AnotherOrder:
    """The array namespace, product and sums of decays of the stages, with every sum in a random order.

    The channels and tokens over which a product or a sum runs are shuffled, and the tree that sums a chunk's decays
    begins at a random place. With ``anywhere``, chunks also begin at other tokens, as after padding or in a packed row.
    """

    def __init__(self, rng: np.random.Generator, base2: bool = False, anywhere: bool = False) -> None:
        self._rng, self._sums, self._anywhere = rng, decay_base2 if base2 else decay, anywhere
        self.exp = np.exp2 if base2 else np.exp

    def __getattr__(self, name: str) -> Any:
        return getattr(xp, name)

    def sum(self, x: np.ndarray, axis: int, keepdims: bool = False) -> np.ndarray:
        """Compute the array API's sum along one axis."""
        return np.sum(np.take(x, self._rng.permutation(x.shape[axis]), axis), axis=axis, keepdims=keepdims)

    def product(self, a: np.ndarray, b: np.ndarray, name_a: str, name_b: str) -> np.ndarray:
        """The plain product."""
        order = self._rng.permutation(a.shape[-1])
        return a[..., order] @ b[..., order, :]

    def decay(self, xp: Any, g: np.ndarray, starts: np.ndarray | None = None) -> Decays:
        """Compute ``stages.decay`` of the chunk extended by gates of 0 on both sides."""
        C = g.shape[-2]
        before = int(self._rng.integers(C))
        sides = [(0, 0)] * (g.ndim - 2) + [(before, C - before), (0, 0)]
        G, count = self._sums(xp, np.pad(g, sides))
        return Decays(G[..., before : before + C, :], count[..., before : before + C, :])

    def first_chunk(self, size: int, T: int) -> int:
        """Return the number of tokens of the first chunk of T tokens."""
        return int(self._rng.integers(1, min(size, T) + 1)) if self._anywhere and T else size


def chunk_by_chunk(
    chunk_size: int = 64,
    product: Product = matmul,
    fused: bool = True,
    stages: Any = None,
    base2: bool = False,
    stored: Callable[[np.ndarray, str], np.ndarray] = lambda x, name: x,
    order: AnotherOrder | None = None,
) -> CoreRule:
    """Return a ``CoreRule`` that computes the rule chunk by chunk with the stages.

    Args:
        chunk_size: the number of tokens per chunk; the last chunk is padded to a power of two with tokens that change
            nothing.
        product: the matrix product.
        fused: whether Vn is computed directly from the state, as in fast backends; otherwise the forward pass goes
            through all seven stages.
        stages: another module with the seven stages; tests pass one with a fault in it.
        base2: whether sums of decays are in base 2, as with ``Rounding.base2``; requires ``fused``.
        stored: rounds stored states; see ``chunkwise.backward_chunk``.
        order: the order of all sums, instead of ``product`` and ``base2``; requires ``fused``.
    """
    namespace, sums = (PowersOf2(), decay_base2) if base2 else (xp, decay)
    if order is not None:
        namespace, product, sums = order, order.product, order.decay
    algebra = Algebra(namespace, product)

    def operands(part: Core, S: np.ndarray) -> chunkwise.ChunkOperands:
        return chunkwise.ChunkOperands(*part[:6], S)

    def rule(x: Core, scale: float, dO: OutputCotangent | None = None, dS: np.ndarray | None = None) -> CoreResult:
        def backward(part: Core, S: np.ndarray, saved: Any, dO: np.ndarray, dS: np.ndarray) -> Any:
            return chunkwise.backward_chunk(algebra, operands(part, S), scale, saved, dO, dS, sums, stored)

        T = x.q.shape[2]
        S, o, kept = x.S, [], []
        first = chunk_size if order is None else order.first_chunk(chunk_size, T)
        cuts = [(max(i, 0), min(i + chunk_size, T)) for i in range(first - chunk_size, T, chunk_size)]
        with np.errstate(invalid="ignore", over="ignore"):
            for a, b in cuts:
                part = _chunk(x, a, b)
                if fused and stages is None:
                    out, after, saved = chunkwise.forward_chunk(algebra, operands(part, S), scale, sums)
                else:
                    given = {} if stages is None else {"stages": stages}
                    named = chunkwise.stage_chunk(Algebra(xp, product), operands(part, S), scale, **given)
                    (out,), (_, after) = named["output"], named["state"]
                    saved = chunkwise.Saved(named["inverse"][0], named["scores"][1], named["delta"][0])
                kept.append((part, S, saved))
                o.append(out[:, :, : b - a])
                S = after
            result = CoreResult(np.concatenate(o, 2) if o else np.zeros_like(x.v), S)
            if dO is None or dS is None:
                return result
            out_d = output_cotangent(dO, result.o)
            return result._replace(gradients=_backward(x, backward, cuts, kept, out_d, dS))

    return rule


def _backward(
    x: Core,
    backward: Callable[..., Any],
    cuts: list[tuple[int, int]],
    kept: list[Any],
    dO: np.ndarray,
    dS: np.ndarray,
) -> CoreGradients:
    parts: list[CoreGradients] = []
    for (a, b), (part, S, saved) in zip(cuts[::-1], kept[::-1], strict=True):
        out = _pad(dO[:, :, a:b], part.q.shape[2])
        d = backward(part, S, saved, out, dS)
        dS = d.S
        parts.append(CoreGradients(*(None if v is None else v[:, :, : b - a] for v in d[:6]), d.S))
    if not parts:
        return CoreGradients(*(None if v is None else np.zeros_like(v) for v in x[:6]), dS)
    parts = parts[::-1]
    joined = [None if v[0] is None else np.concatenate(v, 2) for v in zip(*(p[:6] for p in parts), strict=True)]
    joined[0] = joined[0].sum(1, keepdims=True)
    joined[1] = joined[1].sum(1, keepdims=True)
    return CoreGradients(*joined, dS)


def _pad(a: np.ndarray, length: int) -> np.ndarray:
    return np.pad(a, [(0, length - n if axis == 2 else 0) for axis, n in enumerate(a.shape)])


def _chunk(x: Core, a: int, b: int) -> Core:
    """Return tokens a to b, padded to a power of two with tokens that change nothing (k = v = g = 0)."""
    length = 1 << (b - a - 1).bit_length()
    return Core(*(None if v is None else _pad(v[:, :, a:b], length) for v in x[:6]), x.S)
