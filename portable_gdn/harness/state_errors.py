"""What storing states in few bits does to outputs, head by head: measured on operands that a file holds.

Every token's state is rounded to each dtype before the next token reads it, as a pool in that dtype would, and the last
outputs are compared with those of states that nothing rounds. Everything else is float64, so that the error is that of
storage alone. It grows with how long a head remembers: an error in the state lives as long as the state does.

A port or checkpoint holds no activations, but A_log and dt_bias: its heads' decays where the projection is 0. For those
errors are measured on drawn tokens with correlated keys over a range of decays, and read off for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..serving.at_rest import DTYPES
from ..spec.errors import GdnError, bad
from ..spec.gates import activate_gate, l2norm
from ..spec.stages import RESET
from .doctor import Call, calls, log_decays
from .tensor_file import TensorFile

__all__ = ["LAST", "VALUES", "HeadStates", "of_call", "of_file"]

#: Outputs at the end that are compared, and value channels that are computed: columns of a state do not meet.
LAST, VALUES = 512, 16
#: Mean log decays over which drawn tokens are measured, and the sizes of their heads; keys share a direction.
_GRID = -np.concatenate([[0.0], np.geomspace(1e-5, 10.0, 25)])
_KEY_DIM, _SEED, _SHARED = 64, 1, 0.5

Progress = Callable[[str, int, int], None]


class HeadStates(NamedTuple):
    """One value head.

    Attributes:
        call: the call or layer that it belongs to. head: its number.
        decay: mean log decay of a token, over its channels; resets are left out.
        memory: tokens in which decay alone takes its slowest channel to 1/e; inf without decay.
        errors: by dtype, the relative L2 error of its last outputs.
    """

    call: str
    head: int
    decay: float
    memory: float
    errors: dict[str, float]


def of_file(path: Path, tokens: int, progress: Progress | None = None) -> list[HeadStates]:
    """The heads of every call of a recording, or of every layer of a port or checkpoint.

    Args:
        path: what ``doctor.calls`` reads, or a safetensors file or a folder of them with tensors A_log.
        tokens: how many to compute; a recording's are repeated.

    Raises:
        GdnError: there is neither, or tokens is not positive.
    """
    if tokens < 1:
        raise bad("--tokens", tokens, "be a positive number")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise GdnError(f"{path}: the folder holds no safetensors files; a port or checkpoint in safetensors has some.")
    opened = {file: TensorFile(file) for file in files}
    found: list[HeadStates] = []
    for file in files:
        try:
            some = [call for call in calls(file) if isinstance(call, Call)]
        except GdnError:  # no operands in it, but perhaps parameters
            continue
        for call in some:
            found += of_call(call, tokens, progress)
    if not found:
        found = list(_of_parameters(opened, tokens, progress))
    if not found:
        raise GdnError(f"{path}: there are no operands q, k, v and g, and no parameters A_log, to tell decays from.")
    return found


def of_call(call: Call, tokens: int, progress: Progress | None = None) -> list[HeadStates]:
    """The value heads of one call, by its first row."""
    x = {name: np.asarray(a, np.float64) for name, a in call.operands.items()}
    if not x["q"].shape[0] * x["q"].shape[1]:
        return []
    HV = x["v"].shape[2]
    g = log_decays(call, x)
    g = np.zeros((*x["v"].shape[:3], 1)) if g is None else g
    each = lambda a: np.repeat(l2norm(np, a) if call.qk_l2norm else a, HV // a.shape[2], axis=2)[0]  # noqa: E731
    k = each(x["k"])

    def strength(name: str) -> np.ndarray | float:
        """A gate [T, HV, 1 or channels] of the first row, or 1."""
        a = x.get("beta", x.get(name))
        return 1.0 if a is None else a[0][..., None] if a.ndim == 3 else a[0]

    erased = strength("erase") * k if {"beta", "erase"} & set(x) else np.zeros_like(k)
    written = (strength("write") * x["v"][0])[..., :VALUES]
    errors = _errors(each(x["q"]), k, written, g[0], erased, tokens, call.name, progress)
    return list(_heads(call.name, g[0], errors))


def _heads(call: str, g: np.ndarray, errors: Mapping[str, np.ndarray]) -> Iterator[HeadStates]:
    live = np.where((g < RESET) | ~np.isfinite(g), np.nan, g)
    for head in range(g.shape[1]):
        some = live[:, head]
        by_channel = np.nanmean(some, axis=0) if np.isfinite(some).any() else np.full(1, RESET)
        slowest = float(-np.nanmax(by_channel))
        memory = 1 / slowest if slowest > 0 else np.inf
        yield HeadStates(
            call, head, float(np.nanmean(by_channel)), memory, {dtype: float(of[head]) for dtype, of in errors.items()}
        )


def _errors(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, erase: np.ndarray,
    tokens: int, name: str, progress: Progress | None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The relative errors of the last outputs of each head, by dtype.

    Args:
        q, k, erase: [T, HV, K], erase b k. v: w v [T, HV, V]. g: [T, HV, n] log decays.
    """
    T, HV, K = k.shape
    S = np.zeros((1 + len(DTYPES), HV, K, v.shape[-1]))  # the first is rounded nowhere
    largest, lagging = np.zeros(HV), 1 + DTYPES.index("int16")
    d = np.exp(np.repeat(np.where(g < RESET, -np.inf, g), K // g.shape[-1], axis=-1))[..., None]
    off, size = np.zeros((len(DTYPES), HV)), np.zeros(HV)
    for token in range(tokens):
        t = token % T
        if progress is not None and token % 64 == 0:
            progress(name, token, tokens)
        S *= d[t]
        u = v[t] - (erase[t][:, None] @ S)[..., 0, :]
        S += k[t][..., None] * u[..., None, :]
        if token >= tokens - LAST:
            o = (q[t][:, None] @ S)[..., 0, :]
            off += np.square(o[1:] - o[0]).sum(-1)
            size += np.square(o[0]).sum(-1)
        for number, dtype in enumerate(DTYPES, 1):
            if dtype == "int16":
                bound = d[t].max((1, 2)) * largest + np.abs(k[t]).max(-1) * np.abs(u[lagging]).max(-1)
                largest = np.abs(S[number]).max((1, 2))
                S[number] = _by_bound(S[number], bound)
            else:
                S[number] = _stored(S[number], dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.sqrt(np.where(size > 0, off / size, 0.0))
    return dict(zip(DTYPES, found, strict=True))


def _stored(S: np.ndarray, dtype: str) -> np.ndarray:
    """States [HV, K, V] after they were stored."""
    if dtype == "int8":
        scale = np.maximum(np.abs(S).max(-1, keepdims=True), 1e-300) / 127
        return np.rint(S / scale) * scale
    return S.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32).astype(np.float64)


def _by_bound(S: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """States [HV, K, V] stored as int16 with a scale a head that no token waits for: from a bound [HV] on its numbers.

    The bound is the largest number a token ago, decayed, and the largest that the token adds. (Twice the largest number
    a token ago would do for heads that remember; those that forget quickly more than double, and were cut off.)
    """
    scale = np.maximum(bound, 1e-300)[:, None, None] / 32767
    return np.clip(np.rint(S / scale), -32767, 32767) * scale


def _of_parameters(files: Mapping[Path, TensorFile], tokens: int, progress: Progress | None) -> Iterator[HeadStates]:
    layers = []
    for file in files.values():
        for name in (n for n in file.shapes if n.split(".")[-1].split("/")[-1] == "A_log"):
            prefix = name[: -len("A_log")]
            A = file.read(name).astype(np.float64).reshape(-1)
            bias = prefix + "dt_bias"
            of = next((f for f in files.values() if bias in f), None)
            soft = np.zeros(len(A)) if of is None else of.read(bias).astype(np.float64).reshape(len(A), -1).T
            layers.append((prefix.rstrip("./"), np.asarray(activate_gate(np, soft.reshape(-1, len(A)), A, None, None))))
    if not layers:
        return
    rng = np.random.default_rng(_SEED)
    heads, T = len(_GRID), min(tokens, 4096)
    k, q = (rng.standard_normal((T, heads, _KEY_DIM)) for _ in range(2))
    k += _SHARED * np.sqrt(_KEY_DIM) * k[:1] / np.linalg.norm(k[:1], axis=-1, keepdims=True)
    k, q = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (k, q))
    beta = rng.uniform(0, 1, (T, heads, 1))
    g = np.broadcast_to(_GRID[:, None], (T, heads, 1))
    v = beta * rng.standard_normal((T, heads, VALUES))
    errors = _errors(q, k, v, g, beta * k, tokens, "a range of decays", progress)
    at = np.log10(np.maximum(-_GRID, 1e-6))
    for name, decays in layers:
        for head in range(decays.shape[1]):
            slowest = float(-decays[:, head].max())
            place = np.log10(max(slowest, 1e-6))
            read = {
                dtype: float(10 ** np.interp(place, at, np.log10(np.maximum(of, 1e-12))))
                for dtype, of in errors.items()
            }
            yield HeadStates(name, head, float(decays[:, head].mean()), 1 / slowest if slowest > 0 else np.inf, read)
