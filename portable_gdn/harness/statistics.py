"""The structure of an error: where it is, whether it grows, and whether it is biased.

An error that consists of rounding alone is spread evenly over heads, chunks and positions, grows no faster than the
result, has a mean of zero and is not correlated with the result. Every deviation from this is reported in a sentence
with its figure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..spec.operands import PER_TOKEN
from ..spec.problem import Signature

__all__ = ["Statistics", "and_list", "by_token", "statistics"]

STANDS_OUT = 4.0  # how many times the median of its kind, in root mean square, an outlier is
MOST_NAMED = 8  # the most outliers of a kind that are named one by one
ROWS = 256  # the rows of an error map; more tokens are averaged

_TOKENS = (*PER_TOKEN, "o")


class Statistics(NamedTuple):
    """The errors of one tensor, as root mean squares relative to that of the exact tensor.

    ``by_token`` is [rows, heads], with tokens averaged to at most ROWS rows. ``by_position`` is by the position within
    a chunk. ``drift`` is the error of the last quarter over that of the first, each relative to the result there.
    ``bias`` is the mean error over the root mean square error, and ``bias_sigmas`` is the mean in units of its standard
    error. ``gain`` is the slope of the error against the exact result. ``ulps`` are the fractions of elements that are
    off by 0, up to 1, 2, 4, ... units in the last place of the result's dtype, and last the rest.
    """

    by_head: list[float]
    by_chunk: list[float]
    by_position: list[float]
    by_token: list[list[float]]
    drift: float
    bias: float
    bias_sigmas: float
    gain: float
    ulps: dict[str, float]
    findings: list[str]
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as a dictionary for JSON, in which figures that are not finite are strings."""
        clean = lambda x: x if not isinstance(x, float) or np.isfinite(x) else str(x)  # noqa: E731
        table = self._asdict()
        for name, value in table.items():
            if name == "by_token":
                table[name] = [[clean(x) for x in row] for row in value]
            elif isinstance(value, list):
                table[name] = [clean(x) for x in value]
            else:
                table[name] = clean(value)
        return table


def by_token(name: str, a: np.ndarray, s: Signature) -> np.ndarray | None:
    """Return a tensor as [B, T, heads, channels], or None if it has no tokens."""
    plain = name.removeprefix("grad_")
    if plain not in _TOKENS or not a.size:
        return None
    a = np.asarray(a, np.float64)
    if s.step:
        a = a[:, None]
    if plain == "qkv" or (s.conv is not None and plain in ("q", "k", "v")):
        return a[:, :, None]
    return a.reshape(*a.shape[:2], s.HV, -1) if plain == "z" else a.reshape(*a.shape[:3], -1)


def statistics(
    name: str, value: np.ndarray, exact: np.ndarray, s: Signature, chunk: int, starts: np.ndarray | None = None
) -> Statistics | None:
    """Compute statistics of the error of one tensor, with sentences on everything that stands out.

    Args:
        name: the name of the tensor.
        value: the computed tensor.
        exact: the exact tensor.
        s: the signature of the call.
        chunk: the number of tokens per chunk.
        starts: cu_seqlens, if sequences are packed.

    Returns:
        The statistics, or None if the tensor has no tokens.
    """
    truth = by_token(name, exact, s)
    if truth is None:
        return None
    ulps = _ulps(value, exact)
    error = by_token(name, np.asarray(value, np.float64) - exact, s)
    assert error is not None
    unit = max(float(np.sqrt((truth**2).mean())), 1e-300)
    square = (error / unit) ** 2
    T = square.shape[1]
    token = np.arange(T)
    if starts is not None:
        token = (
            token - np.asarray(starts)[np.clip(np.searchsorted(starts, token, side="right") - 1, 0, len(starts) - 2)]
        )
    per_token = square.mean((0, 3))  # [T, heads]
    root = lambda x: [float(y) for y in np.sqrt(x)]  # noqa: E731
    heads, chunks = root(per_token.mean(0)), root(_means(per_token.mean(1), np.arange(T) // chunk))
    positions = root(_means(per_token.mean(1), token % chunk))
    rows = np.sqrt(_means(per_token, np.arange(T) * min(T, ROWS) // T))
    drift = _drift(per_token.mean(1), (truth**2).mean((0, 2, 3)))
    bias, sigmas, gain = _lean(error, truth)
    findings = [
        *_standing_out("head", heads),
        *_standing_out("chunk", chunks),
        *_standing_out("position in a chunk", positions),
    ]
    if drift > STANDS_OUT:
        findings.append(
            "the relative error grows along the sequence: "
            f"it is {_times(drift)} as large in the last quarter as in the first"
        )
    if abs(bias) > 0.3 and sigmas > 6:
        findings.append(f"the error leans to one side: its mean is {bias:+.2f} of its size ({sigmas:.0f} sigma)")
    if abs(gain) * unit > 0.7 * np.sqrt((error**2).mean()) and error.size > 16 and np.any(error):
        findings.append(f"the error follows the result: everything is {gain:+.1e} times itself too large")
    table = [[float(x) for x in row] for row in rows]
    return Statistics(heads, chunks, positions, table, drift, bias, sigmas, gain, ulps, findings, T)


def _means(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Return the mean of x over its first axis for each label; labels that do not occur are left out."""
    kinds, place = np.unique(label, return_inverse=True)
    total = np.zeros((len(kinds), *x.shape[1:]))
    np.add.at(total, place, x)
    return total / np.bincount(place).reshape(-1, *(1,) * (x.ndim - 1))


def _drift(error: np.ndarray, size: np.ndarray) -> float:
    quarter = len(error) // 4
    if quarter < 8 or not error[:quarter].sum() or not size[:quarter].sum() or not size[-quarter:].sum():
        return 1.0
    first, last = (error[part].sum() / size[part].sum() for part in (slice(quarter), slice(-quarter, None)))
    return float(np.sqrt(last / first))


def _lean(error: np.ndarray, truth: np.ndarray) -> tuple[float, float, float]:
    """Return the mean over the root mean square, the mean in standard errors, and the slope against the truth."""
    rms = float(np.sqrt((error**2).mean()))
    if not rms or not np.isfinite(rms):
        return 0.0, 0.0, 0.0
    mean = float(error.mean())
    spread = float(error.std()) / np.sqrt(error.size)
    gain = float((error * truth).sum() / max(float((truth**2).sum()), 1e-300))
    return mean / rms, abs(mean) / max(spread, 1e-300), gain


def _times(x: float) -> str:
    return f"{x:.1f} times" if x < 10 else f"{x:.0f} times" if x < 1000 else "more than 1000 times"


def _at_least(x: float) -> str:
    return _times(x) if x >= 1000 else f"at least {_times(x)}"


def _standing_out(what: str, values: list[float]) -> list[str]:
    """Return a sentence that names all values that stand out, if some do."""
    if len(values) < 3:
        return []
    middle = float(np.median(values))
    out = [i for i, value in enumerate(values) if value > STANDS_OUT * middle or not np.isfinite(value)]
    if not 0 < len(out) <= min(MOST_NAMED, len(values) // 2):  # if many stand out, none is an exception
        return []
    least = min(values[i] for i in out)
    known = middle > 0 and np.isfinite(least)
    if len(out) == 1:
        size = f"is {_times(least / middle)} that of the median one" if known else "is all there is"
        return [f"{what} {out[0]} stands out: its error {size}"]
    size = f"is {_at_least(least / middle)} that of the median one" if known else "is not that of the others"
    return [f"{_plural(what)} {and_list(out)} stand out: the error of each {size}"]


def _plural(what: str) -> str:
    return what.replace("head", "heads").replace("position", "positions") if what != "chunk" else "chunks"


def and_list(names: list[Any]) -> str:
    """Join names as in "1", "1 and 4", "1, 2 and 4"."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def _ulps(value: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Return distances in units in the last place of the value's dtype, as fractions of all elements."""
    value, bits = np.asarray(value), {"float32": 23, "float16": 10, "bfloat16": 7, "float64": 52}
    smallest = {"float32": -149, "float16": -24, "bfloat16": -133, "float64": -1074}[value.dtype.name]
    nearest = np.asarray(exact).astype(ml_dtypes.bfloat16 if value.dtype.name == "bfloat16" else value.dtype)
    _, exponent = np.frexp(np.asarray(exact, np.float64))
    unit = np.ldexp(1.0, np.maximum(exponent - 1 - bits[value.dtype.name], smallest))
    with np.errstate(invalid="ignore"):
        off = np.abs(np.asarray(value, np.float64) - np.asarray(nearest, np.float64)) / unit
    edges = [0.0, *(2.0**n for n in range(11))]
    share, below = {}, 0.0
    for edge in edges:
        upto = float((off <= edge).mean()) if off.size else 1.0
        share["0" if edge == 0 else f"{edge:g}"] = upto - below
        below = upto
    share["more"] = 1.0 - below
    return share
