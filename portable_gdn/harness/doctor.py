"""What will hurt in the operands of a call, before anything is computed: read from a file, said in sentences.

A file is a recording of runs, a recording of a model's layer (``recordings``), or any safetensors file with tensors
q, k, v, and g, beta, erase, write, A_log, dt_bias, initial_state as far as there are such, in the shapes of
``gated_delta_rule``. Names may share a prefix (``layer.3.q``); each prefix is one call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import door
from ..spec.errors import GdnError
from ..spec.gates import activate_gate, l2norm
from ..spec.operands import DIFFERENTIABLE, GATES, along
from ..spec.problem import GateKind, Options
from ..spec.stages import RESET
from .cases import TOKENS
from .recordings import FORMAT as LAYER
from .recordings import load
from .run_file import FORMAT as RUN
from .run_file import RunFile
from .tensor_file import TensorFile

__all__ = ["Call", "Finding", "calls", "diagnose", "examine", "log_decays"]

#: What a call of the rule can have, without a convolution's operands.
NAMES = tuple(name for name in DIFFERENTIABLE if name not in along("C"))


class Finding(NamedTuple):
    """One thing that will hurt ("error": the result is wrong or not finite; "warning": it may be poor; "note")."""

    call: str
    severity: str
    what: str
    why: str


class Call(NamedTuple):
    """The operands of one call, with what is known of how it is made; None: not known."""

    name: str
    operands: Mapping[str, np.ndarray]
    qk_l2norm: bool | None
    raw_gate: bool
    lower_bound: float | None


def calls(path: Path) -> Iterator[Call | Finding]:
    """The calls that a file holds; a finding instead of one that was damaged.

    Raises:
        GdnError: it holds none, or cannot be read.
    """
    file = TensorFile(path)
    if file.metadata.get("format") == RUN:
        run = RunFile(path)
        for case in run.cases:
            if not run.intact(case):
                what = "its tensors do not have the hash that was recorded"
                yield Finding(case.name, "error", what, "the file was damaged or changed; record again")
                continue
            try:
                inputs = run.recorded_inputs(case)
            except GdnError as error:
                yield Finding(case.name, "error", str(error).rstrip("."), "its operands are not known")
                continue
            if case.conv is None:
                x, gate = dict(inputs.operands), inputs.options.gate
                if inputs.options.step:
                    x = {n: a[:, None] if n in TOKENS else a for n, a in x.items()}
                if "mask" in x:  # what padding holds does not matter
                    x = {n: a[:, x["mask"].all(0)] if n in TOKENS else a for n, a in x.items()}
                bound = None if gate is None else gate.lower_bound
                yield Call(case.name, x, inputs.options.qk_l2norm, gate is not None, bound)
        return
    if file.metadata.get("format") == LAYER:
        recording = load(path)
        for prefix in ("", "step_"):
            x = {n: recording.arrays[prefix + n] for n in NAMES if prefix + n in recording.arrays}
            yield Call(f"{path.stem} {prefix}".rstrip("_ "), x, recording.metadata["qk_l2norm"] == "true", False, None)
        return
    prefixes = sorted(name[:-1] for name in file.shapes if name == "q" or name.endswith((".q", "/q")))
    prefixes = [p for p in prefixes if p + "k" in file and p + "v" in file]
    if not prefixes:
        raise GdnError(f"{path}: the file holds no q, k and v; tensors must be called so, with one prefix or none.")
    said = file.metadata.get("qk_l2norm")
    for prefix in prefixes:
        x = {n: file.read(prefix + n) for n in NAMES if prefix + n in file}
        raw = "A_log" in x
        yield Call(prefix.rstrip("./") or path.stem, x, None if said is None else said == "true", raw, None)


def diagnose(path: Path) -> tuple[list[str], list[Finding]]:
    """Names of the calls that were examined, and what was found.

    Raises:
        GdnError: the file cannot be read, or of no call in it do q, k and v fit together.
    """
    names: list[str] = []
    found: list[Finding] = []
    unfit: list[GdnError] = []
    for call in calls(path):
        if isinstance(call, Finding):
            found.append(call)
            continue
        try:
            found += list(examine(call))
            names.append(call.name)
        except GdnError as error:  # the other calls are worth a look
            unfit.append(error)
            what = str(error).removeprefix(f"{call.name}: ").rstrip(".")
            found.append(Finding(call.name, "error", what, "nothing else of this call can be examined"))
    if unfit and not names:
        raise unfit[0]
    return names, found


def examine(call: Call) -> Iterator[Finding]:
    """What will hurt in one call.

    Raises:
        GdnError: its tensors do not fit together.
    """
    x = {name: np.asarray(a, np.float64) for name, a in call.operands.items() if name in NAMES}
    q, k, v = x["q"], x["k"], x["v"]
    fits = q.ndim == v.ndim == 4 and k.shape == q.shape and v.shape[:2] == q.shape[:2]
    if not (fits and q.shape[2] and not v.shape[2] % q.shape[2]):
        raise GdnError(
            f"{call.name}: q, k and v have shapes {q.shape}, {k.shape} and {v.shape}; they must be [B, T, H, K] twice "
            f"and [B, T, HV, V] with HV a multiple of H{_heads_first(call, x)}."
        )
    for name, sentence in _refused(call):
        yield Finding(call.name, "error", sentence, f"the call will be refused{_guess(call, x, name)}")
        if name not in ("q", "k", "v"):
            x.pop(name, None)
    if q.shape[1] and 4 * q.shape[1] < q.shape[2] and q.shape[2] >= 32 and q.shape[1] > 1:
        what = f"there are {q.shape[2]} heads and {q.shape[1]} tokens"
        why = "operands are [B, T, H, K]; are these [B, H, T, K], heads before tokens?"
        yield Finding(call.name, "note", what, why)
    g = log_decays(call, x)
    with np.errstate(all="ignore"):
        for part in (
            _not_finite(x),
            _parameters(call, x),
            _lengths(q, k, call.qk_l2norm),
            _float16(call, x),
            () if g is None else _gates(g),
            _erasing(x, bool(call.qk_l2norm)),
        ):
            for severity, what, why in part:
                yield Finding(call.name, severity, what, why)


def _refused(call: Call) -> Iterator[tuple[str, str]]:
    """Operands that do not fit to q, k and v, in shape or dtype, each with the sentence in which a call refuses it."""
    x = {name: np.asarray(a) for name, a in call.operands.items() if name in NAMES}
    gate = GateKind(call.lower_bound) if call.raw_gate and "g" in x else None
    x = x if gate is not None else {name: a for name, a in x.items() if name not in ("A_log", "dt_bias")}
    left = set(x)
    HV, decays = x["v"].shape[2], x["g"].shape[3:] if "g" in x else ()
    sizes = {HV * n for n in (*decays, *(() if decays else (1,)))}
    if "dt_bias" in call.operands and np.size(call.operands["dt_bias"]) not in sizes:
        must = " or ".join(str(list(shape)) for shape in {(HV,), (HV, *decays)} if np.prod(shape) in sizes)
        yield "dt_bias", f"dt_bias is of shape {list(call.operands['dt_bias'].shape)}; it must have shape {must}"
        left -= {"dt_bias"}
    while left:  # one more is refused each time
        sentence = ""
        for layout in ("kv", "vk"):  # which a file does not say
            try:
                door.normalise({n: x[n] for n in x if n in left}, Options(gate=gate, state_layout=layout), "numpy")
                return
            except GdnError as error:
                sentence = sentence or str(error).rstrip(".")
        name = next((word for word in re.findall(r"\w+", sentence) if word in left), None)
        yield name or "q", sentence
        if name in (None, "q", "k", "v"):
            return
        left -= {name}
        if name == "g":
            gate, left = None, left - {"A_log", "dt_bias"}


def _swapped(x: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: np.swapaxes(a, 1, 2) if n in TOKENS and a.ndim > 2 else a for n, a in x.items()}


def _heads_first(call: Call, x: Mapping[str, np.ndarray]) -> str:
    """A guess, if the call would fit with heads and tokens in the other order, in all of it or in q, k and v."""
    for other in (_swapped(x), {**x, **_swapped({n: x[n] for n in "qkv"})}):
        if not list(_refused(call._replace(operands={n: a.astype(np.float32) for n, a in other.items()}))):
            return "; they look like [B, H, T, K], heads before tokens"
    return ""


def _guess(call: Call, x: Mapping[str, np.ndarray], name: str) -> str:
    """What may have happened to an operand that is refused."""
    if guess := _heads_first(call, x):
        return guess.replace("they look", "q, k and v look")
    if name not in x or name not in GATES:
        return ""
    (B, T, H), HV = x["q"].shape[:3], x["v"].shape[2]
    shape = x[name].shape
    if shape[:2] == (B, HV) and shape[2:3] == (T,):
        return f"; {name} looks like [B, HV, T], heads before tokens"
    if shape[:3] == (B, T, H) and H != HV:
        return f"; {name} has one for each key head, and there must be one for each of the {HV} value heads"
    return ""


_Said = Iterator[tuple[str, str, str]]


def _place(a: np.ndarray, at: int) -> str:
    """A token, head and channel in words."""
    names = ("row", "token", "head", "channel")
    return ", ".join(f"{name} {i}" for name, i in zip(names, np.unravel_index(at, a.shape), strict=False))


def _not_finite(x: Mapping[str, np.ndarray]) -> _Said:
    for name, a in x.items():
        bad = ~np.isfinite(a)
        if name == "g":
            bad &= a != -np.inf  # which is a reset
        if bad.any():
            what = f"{name} holds {bad.sum()} values that are not finite, first at {_place(a, int(np.argmax(bad)))}"
            yield "error", what, "all that follows in its sequence becomes NaN"


def _parameters(call: Call, x: Mapping[str, np.ndarray]) -> _Said:
    for name in ("A_log", "dt_bias"):
        if name in x and call.operands[name].dtype != np.float32:
            yield (
                "warning",
                f"{name} is {call.operands[name].dtype.name}",
                "a decay is exp(-exp(A_log) softplus(...)): 8 bits of A_log put every step's decay off by up to 0.2 %, "
                "which multiplies along the sequence; keep it float32",
            )
    if "A_log" in x and (x["A_log"] > 10).any():
        what = f"A_log reaches {x['A_log'].max():.1f}"
        yield "warning", what, "the decay's rate is its exponential; this forgets at once"


def _lengths(q: np.ndarray, k: np.ndarray, unit: bool | None) -> _Said:
    for name, a in (("q", q), ("k", k)):
        length = np.sqrt((a * a).sum(-1))
        length = length[np.isfinite(length)]
        if not length.size:
            continue
        low, high = np.percentile(length, (1, 99))
        if unit and (length < 1e-2).any():
            yield (
                "note",
                f"{(length < 1e-2).sum()} rows of {name} are shorter than 0.01",
                "l2norm divides by sqrt(|x|^2 + 1e-6): conventions of the epsilon differ there, gradients are large",
            )
        if not unit and name == "k" and high > 1.5:
            hint = "" if unit is False else "; with qk_l2norm=True they are normalised in the call"
            yield (
                "warning",
                f"rows of k are {low:.2g} to {high:.2g} long",
                f"keys are not normalised: the rule erases along k by beta |k|^2, which should stay below 2{hint}",
            )
        if not unit and name == "q" and high > 100:
            what = f"rows of q are up to {high:.2g} long"
            yield "note", what, "outputs grow with them; is a scale or a norm missing?"


def _float16(call: Call, x: Mapping[str, np.ndarray]) -> _Said:
    if call.operands["q"].dtype == np.float16:
        largest = max(float(np.nanmax(np.abs(x[name]), initial=0)) for name in ("v", "initial_state") if name in x)
        if largest > 1e4:
            what = f"float16 operands beside values of {largest:.0f}"
            yield "error", what, "float16 ends at 65504; take bfloat16"


def log_decays(call: Call, x: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Log decays [B, T, HV, n], activated if they are raw."""
    if "g" not in x:
        return None
    HV = x["v"].shape[2]
    g = x["g"].reshape(*x["g"].shape[:2], HV, -1) if x["g"].size else x["g"].reshape(*x["v"].shape[:3], 1)
    if not call.raw_gate:
        return g
    A, bias = x.get("A_log"), x.get("dt_bias")
    A, bias = None if A is None else A[:, None], None if bias is None else bias.reshape(HV, -1)
    with np.errstate(all="ignore"):
        return np.asarray(activate_gate(np, g, A, bias, call.lower_bound))


def _gates(g: np.ndarray) -> _Said:
    positive = g > 0
    if positive.any():
        first = _place(g, int(np.argmax(positive)))
        hint = "it looks like the decay itself, of which the rule wants the logarithm"
        yield (
            "error",
            f"g is positive {positive.sum()} times, up to {g.max():.3g}, first at {first}",
            f"a log decay must be <= 0: the state grows; {hint if (g >= 0).all() and g.max() <= 1 else 'is it raw?'}",
        )
    reset = g < RESET
    if reset.any():
        yield (
            "note",
            f"{reset.sum()} gates are below {RESET:g}, hard resets ({100 * reset.mean():.2g} %)",
            "nothing crosses them, their gradient is 0; flash-linear-attention knows none and is called piece by piece",
        )
    live, T = np.where(reset | ~np.isfinite(g), 0.0, g), g.shape[1]
    dead = (live.mean((0, 1)) < -10) & ~reset.all((0, 1)) if T > 1 else np.zeros(g.shape[2:], bool)
    if dead.any():
        heads = sorted({int(h) for h in np.argwhere(dead)[:, 0]})
        names = ", ".join(map(str, heads[:8])) + (", ..." if len(heads) > 8 else "")
        what = f"heads {names} forget by more than e^-10 a token"
        yield "warning", what, "their state is dead: each output sees little but its own token"
    falls = -np.add.reduceat(live, np.arange(0, T, 64), axis=1) if T else np.zeros(1)
    if falls.max(initial=0) > 1400:
        yield (
            "warning",
            f"g falls by up to {falls.max():.0f} within 64 tokens",
            "kernels that sum gates over a chunk keep too few digits for later ones; those of this package do not",
        )


def _erasing(x: Mapping[str, np.ndarray], unit: bool) -> _Said:
    if "write" in x:
        yield from _strengths("write", x["write"])
    name = "beta" if "beta" in x else "erase"
    if name not in x:
        return
    k, HV = x["k"], x["v"].shape[2]
    keys = np.repeat(l2norm(np, k) if unit else k, HV // k.shape[2], axis=2)
    b = x[name][..., None] if x[name].ndim == 3 else x[name]
    strength = np.nan_to_num((b * keys * keys).sum(-1))
    most = float(strength.max(initial=0))
    if most > 2 * (1 + 1e-6):
        yield (
            "error",
            f"{name} |k|^2 is up to {most:.4g}, at {_place(strength, int(np.argmax(strength)))}, and above 2 at "
            f"{(strength > 2 * (1 + 1e-6)).sum()} tokens and heads",
            "such a step turns the state over and grows it: the recurrence itself diverges",
        )
    elif most > 1.9:
        what = f"{name} |k|^2 reaches {most:.4g}"
        yield "note", what, "close to 2 errors decay slowly: expect less accuracy in 16 bits"
    yield from _strengths(name, b)


def _strengths(name: str, b: np.ndarray) -> _Said:
    if (b < 0).any():
        what = f"{name} is negative {(b < 0).sum()} times"
        yield "warning", what, "it is a sigmoid in every published model; is it a raw projection?"
    elif (b > 2).any():
        yield "warning", f"{name} reaches {b.max():.3g}", "a sigmoid, or twice one, ends at 2; is it a raw projection?"
