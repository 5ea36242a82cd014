"""Properties that every backend must have in every call, tested on operands that hypothesis draws.

    from portable_gdn.harness import check
    check("mine")                      # or check(backend); raises AssertionError with the smallest case that fails

A property takes a backend and a ``Case``, which is the recipe of one call, and raises ``Violation`` with a sentence if
it does not hold. Properties that promise equal bits compare bits; the others compare each result with the budget of the
declared roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from .. import dispatch, door
from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.evaluate import evaluate
from ..spec.operands import INPUTS, PER_TOKEN, WRITE_GATES
from ..spec.undisturbed import undisturbed
from .cases import PACKED, TOKENS, Case, Inputs, build
from .compute import computed
from .judge import ILL_CONDITIONED, Expectation, allowance, by_head, judge
from .randoms import normal
from .truth import Truth

__all__ = ["PROPERTIES", "Refused", "Violation", "Void", "attempt", "cases", "hold"]

Arrays = dict[str, Any]


class Violation(AssertionError):
    """Raised if a property does not hold, with a sentence that says so."""


class Refused(Exception):
    """Raised if the backend does not compute such a call, which is not a violation."""


class Void(Exception):
    """Raised if a property does not apply to a case for any backend, so that another case must be drawn."""


def _problem(backend: Backend, inputs: Inputs) -> Any:
    operands = backend.from_numpy({n: np.array(a) for n, a in inputs.operands.items()})
    try:
        return door.normalise(operands, inputs.options, backend.name)[0]
    except GdnError as error:
        raise Refused(str(error)) from None


def _run(backend: Backend, inputs: Inputs) -> Arrays:
    """Compute a call, and return o, state and conv_state as numpy arrays."""
    try:
        result = door.run(_problem(backend, inputs), backend)
    except GdnError as error:  # because of the operands' contents
        raise Refused(str(error)) from None
    found = {"o": result.o, "state": result.state, "conv_state": result.conv_state}
    return {name: np.asarray(backend.to_numpy(a)) for name, a in found.items() if a is not None}


def _with_gradients(backend: Backend, inputs: Inputs) -> Arrays:
    """Compute a call, and return its results by name and its gradients as grad_*."""
    try:
        return computed(backend, _problem(backend, inputs), inputs)
    except GdnError as error:
        raise Refused(str(error)) from None


def _need(holds: bool, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _changed(inputs: Inputs, where: Any, seed: int) -> Inputs:
    """Return the inputs with other finite values in the operands with tokens at ``where``, a boolean [B, T]."""
    x = {name: np.array(a) for name, a in inputs.operands.items()}
    for name in PER_TOKEN:
        if name in x:
            other = normal(seed, f"other {name}", x[name].shape)
            other = -np.abs(other) if name == "g" and inputs.options.gate is None else other
            if name in WRITE_GATES:
                other = 1 / (1 + np.exp(-other))
            x[name][where] = other.astype(x[name].dtype)[where]
    return inputs._replace(operands=x)


def _tokens(inputs: Inputs, part: slice, carry: Arrays | None = None) -> Inputs:
    """Return some tokens of rows that are not packed, with the states of ``carry`` as initial states."""
    x = {name: a[:, part] if name in TOKENS else a for name, a in inputs.operands.items()}
    if carry is not None:
        x["initial_state"] = carry["state"]
        x |= {"conv_state": carry["conv_state"]} if "conv_state" in carry else {}
    return inputs._replace(operands=x)


def _size(inputs: Inputs) -> tuple[int, int]:
    a = inputs.operands["qkv" if "qkv" in inputs.operands else "q"]
    return (a.shape[0], 1) if inputs.options.step else (a.shape[0], a.shape[1])


def _whole_rows(case: Case) -> Case:
    """Return the case as a plain batch, whose rows may be cut anywhere."""
    return replace(case, layout="rows") if case.layout != "rows" else case


def _bare(case: Case) -> Case:
    """Return the case without the steps that a mixer has around the rule."""
    return replace(case, conv=None, norm=None)


def _close(backend: Backend, inputs: Inputs, found: Arrays, what: str, times: float = 1.0) -> None:
    """Require results to be within the budget of this call."""
    truth = Truth(inputs, gradients=any(name.startswith("grad_") for name in found))
    s = truth.problem.signature
    least = truth.expectation(None)
    for name, value in found.items():
        exact = least.exact.get(name)
        if exact is None or not exact.size or judge(name, value, least, s).ok:
            continue
        expectation = truth.expectation(backend.rounding(_problem(backend, inputs).signature))
        verdict = judge(name, value, expectation, s)
        if not verdict.judged:
            continue
        _need(
            bool(verdict.error <= times * verdict.budget or verdict.ok),
            f"{what}: {name} is off by {verdict.error:.2e} in head {verdict.head}, budget {times * verdict.budget:.2e}",
        )


# the properties ------------------------------------------------------------------------------------------------------


def oracle(backend: Backend, case: Case) -> None:
    """Outputs, states and gradients are within the budget of the declared roundings."""
    inputs = build(case)
    _close(backend, inputs, _with_gradients(backend, inputs), "against the oracle")


def causality(backend: Backend, case: Case) -> None:
    """Changes at tokens from P on leave the outputs before P unchanged, bit for bit."""
    case = _whole_rows(case)
    inputs = build(case)
    _, T = _size(inputs)
    if T < 2:
        raise Void
    P = 1 + case.seed % (T - 1)
    later = np.broadcast_to(np.arange(T) >= P, (_size(inputs)[0], T))
    a, b = _run(backend, inputs)["o"], _run(backend, _changed(inputs, later, case.seed))["o"]
    _need(_same_bits(a[:, :P], b[:, :P]), f"changes at tokens from {P} on reach o before them")


def neighbours(backend: Backend, case: Case) -> None:
    """Changes in one packed sequence, even to NaN, leave the other sequences unchanged, bit for bit."""
    case = replace(case, layout=case.layout if case.layout in PACKED else "packed")
    inputs = build(case)
    bounds = np.asarray(inputs.operands["cu_seqlens"])
    live = np.flatnonzero(np.diff(bounds))
    n = int(live[case.seed % len(live)])
    token = np.arange(bounds[-1])
    inside = (token >= bounds[n]) & (token < bounds[n + 1])
    other = _changed(inputs, inside[None], case.seed)
    if case.seed % 3 == 0:
        name = "qkv" if "qkv" in other.operands else "v"
        other.operands[name][0, bounds[n]] = np.nan
    a, b = _run(backend, inputs), _run(backend, other)
    _need(_same_bits(a["o"][0, ~inside], b["o"][0, ~inside]), f"changes in sequence {n} reach outputs of others")
    rest = np.arange(len(bounds) - 1) != n
    for name in ("state", "conv_state"):
        if name in a:
            _need(_same_bits(a[name][rest], b[name][rest]), f"changes in sequence {n} reach the {name} of others")


def packed_as_alone(backend: Backend, case: Case) -> None:
    """A packed sequence has the results that it has alone; an empty one returns its initial state, bit for bit."""
    case = replace(case, layout=case.layout if case.layout in PACKED else "packed with empties")
    inputs = build(case)
    bounds = [int(x) for x in np.asarray(inputs.operands["cu_seqlens"])]
    packed = _run(backend, inputs)
    for n, (b, e) in enumerate(pairwise(bounds)):
        if b == e:
            start = inputs.operands.get("initial_state")
            start = np.zeros_like(packed["state"]) if start is None else start
            _need(_same_bits(packed["state"][n], start[n]), f"empty sequence {n} does not return its initial state")
    n = int(np.flatnonzero(np.diff(bounds))[case.seed % np.count_nonzero(np.diff(bounds))])
    b, e = bounds[n], bounds[n + 1]
    x = {name: a for name, a in inputs.operands.items() if name != "cu_seqlens"}
    x = {name: a[n : n + 1] if name.endswith("_state") else a for name, a in x.items()}
    alone = _tokens(inputs._replace(operands=x), slice(b, e))
    part = {name: a[:, b:e] if name == "o" else a[n : n + 1] for name, a in packed.items()}
    _close(backend, alone, part, f"packed sequence {n}")


def splits(backend: Backend, case: Case) -> None:
    """A sequence computed in two pieces, with the states passed on, has the results of the whole."""
    case = _whole_rows(case)
    inputs = build(case)
    _, T = _size(inputs)
    P = case.seed % (T + 1)
    first = _run(backend, _tokens(inputs, slice(0, P)))
    second = _run(backend, _tokens(inputs, slice(P, T), first))
    joined = {**second, "o": np.concatenate([first["o"], second["o"]], 1)}
    _close(backend, inputs, joined, f"in two pieces, cut at {P}", 2)


def steps(backend: Backend, case: Case) -> None:
    """Computing one step per token gives the results of computing in chunks."""
    case = replace(_whole_rows(case), T=min(case.T, 6))
    inputs = build(case)
    carried, outputs = {n: a for n, a in inputs.operands.items() if n.endswith("_state")}, []
    if not carried or not _size(inputs)[1]:
        raise Void
    for t in range(_size(inputs)[1]):
        x = {name: a[:, t] if name in TOKENS else a for name, a in inputs.operands.items()} | carried
        found = _run(backend, inputs._replace(operands=x, options=inputs.options._replace(step=True)))
        outputs.append(found.pop("o"))
        carried = {"initial_state" if name == "state" else name: a for name, a in found.items()}
    _close(backend, inputs, {"o": np.stack(outputs, 1), **found}, "step by step", 2)


def _reordered(inputs: Inputs, heads: np.ndarray, rows: np.ndarray) -> Inputs:
    """Return the inputs with rows, and key heads with everything that belongs to them, in another order."""
    x = dict(inputs.operands)
    H = x["q"].shape[2]
    for name, a in x.items():
        axis = 1 if name == "initial_state" else 0 if name in ("A_log", "dt_bias") else 2
        if name in ("mask", "segment_ids"):
            x[name] = a[rows]
            continue
        per = a.shape[axis] // H
        order = (heads[:, None] * per + np.arange(per)).ravel()
        a = np.take(a, order, axis)
        x[name] = a if name in ("A_log", "dt_bias") else a[rows]
    return inputs._replace(operands=x)


def permutations(backend: Backend, case: Case) -> None:
    """Heads and rows in another order have equal results in that order."""
    case = replace(_bare(case), layout="rows" if case.layout in PACKED else case.layout, B=max(case.B, 2))
    inputs = build(case)
    B, H, HV = case.B, case.H, case.HV
    heads, rows = np.roll(np.arange(H), 1)[::-1], np.arange(B)[::-1]
    other = _run(backend, _reordered(inputs, heads, rows))
    back = np.argsort((heads[:, None] * (HV // H) + np.arange(HV // H)).ravel())
    axis = 1 if inputs.options.step else 2
    found = {"o": np.take(other["o"], back, axis)[np.argsort(rows)]}
    if "state" in other:
        found["state"] = other["state"][:, back][np.argsort(rows)]
    _close(backend, inputs, found, "heads and rows in another order")


def scaling(backend: Backend, case: Case) -> None:
    """Doubling v and the state doubles o and the state, and doubling the scale doubles o.

    The results are equal bit for bit, except for underflow.
    """
    case = _bare(case)
    inputs = build(case)
    if case.layout in ("left padding", "right padding", "holes") or not inputs.operands["q"].size:
        raise Void
    plain = _run(backend, inputs)
    x = dict(inputs.operands)
    x["v"] = x["v"] * x["v"].dtype.type(2)
    if "initial_state" in x:
        x["initial_state"] = x["initial_state"] * np.float32(2)
    doubled = _run(backend, inputs._replace(operands=x))
    scale = 2 * case.K**-0.5
    louder = _run(backend, inputs._replace(options=inputs.options._replace(scale=scale)))
    small = {"float32": 2.0**-120, "bfloat16": 2.0**-110, "float16": 2.0**-13}[case.dtype]
    for what, found, factors in (("v and the state", doubled, (2, 2)), ("the scale", louder, (2, 1))):
        for name, factor in zip(("o", "state"), factors, strict=True):
            a, b = (np.asarray(y[name], np.float64) for y in (found, plain))
            with np.errstate(invalid="ignore"):
                off = np.abs(a - factor * b)
            big = ~np.isfinite(a) & ~np.isfinite(b) | (np.abs(factor * b) > 6e4 if case.dtype == "float16" else False)
            _need(bool(np.all((off <= small) | big)), f"{what} doubled: {name} is off by {np.nanmax(off):.2e}")


def dtypes(backend: Backend, case: Case) -> None:
    """Values given in float32 have no larger errors than the identical values given in 16 bits."""
    if case.dtype == "float32" or case.layout == "step":
        raise Void
    inputs = build(case)
    wide = {n: a.astype(np.float32) if n in INPUTS else a for n, a in inputs.operands.items()}
    other = inputs._replace(operands=wide, options=inputs.options._replace(precision="highest"))
    found, better = _run(backend, inputs), _run(backend, other)
    truth = Truth(other, gradients=False)
    s = truth.problem.signature
    for name in ("o", "state"):
        e = truth.expectation(None)
        if name not in e.exact or not e.exact[name].size:
            continue
        errors = [by_head(name, np.asarray(x[name], np.float64) - e.exact[name], s) for x in (found, better)]
        if np.all(errors[1] <= errors[0] + 3 * e.u[name] + e.floor[name]):
            continue
        e = truth.expectation(backend.rounding(_problem(backend, other).signature))
        if np.any(e.E[name] > ILL_CONDITIONED * by_head(name, e.exact[name], s)):
            continue
        _, budget = allowance(name, errors[1] - errors[0], e)
        _need(bool(np.all(errors[1] <= errors[0] + budget)), f"float32 inputs give {name} a larger error than 16 bits")


def finite_differences(backend: Backend, case: Case) -> None:
    """Gradients agree with finite differences of the float64 oracle along a random direction."""
    T = min(case.T, 5)
    variant = "GDN" if case.variant == "tile-grouped" else case.variant
    gates = case.gates if case.gates in ("mild", "-3 each", "zero") else "mild"
    layout = "rows" if case.layout in (*PACKED, "step") else case.layout
    case = replace(_bare(case), T=T, variant=variant, gates=gates, layout=layout)
    case = replace(case, dtype="float32", K=4, V=4, H=1, HV=2, B=1)
    inputs = build(case)
    if not T:
        raise Void
    gradients = {
        n.removeprefix("grad_"): np.asarray(a, np.float64)
        for n, a in _with_gradients(backend, inputs).items()
        if n.startswith("grad_")
    }
    truth = Truth(inputs)
    directions = {n: normal(case.seed, f"direction {n}", gradients[n].shape) for n in gradients}
    if case.gates == "zero" and "g" in directions:
        directions["g"] = -np.abs(directions["g"])  # log decays must not be positive
    mask = inputs.operands.get("mask")
    for name in directions:
        if mask is not None and name in TOKENS:
            directions[name] = np.where(
                mask.reshape(*mask.shape, *(1,) * (directions[name].ndim - 2)), directions[name], 0
            )

    def loss(h: float) -> float:
        x = {
            n: np.asarray(a, np.float64) + h * directions[n] if n in directions else a
            for n, a in truth.problem.operands.items()
        }
        if mask is not None:
            x = {n: np.where(np.isnan(a), 0.0, a) if n in directions else a for n, a in x.items()}
        e = evaluate(truth.problem._replace(operands=x))
        d = inputs.cotangents
        return float(
            (e.o * np.asarray(d["o"], np.float64)).sum() + (e.state * np.asarray(d["state"], np.float64)).sum()
        )

    h = 1e-4
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)  # error h^4
    found, allowed = sum(float((gradients[n] * directions[n]).sum()) for n in gradients), 0.0

    def expectations() -> Iterator[Expectation]:  # each allows more than the last, and takes longer
        yield truth.expectation(None)
        declared = truth.expectation(backend.rounding(_problem(backend, inputs).signature))
        yield declared
        yield declared.widest()

    for e in expectations():
        allowed = 1e-8 * max(1.0, abs(slope))
        for n in gradients:
            name = f"grad_{n}"
            budget = 3 * (e.u[name] + e.E[name]) + e.floor[name]
            allowed += float((budget * by_head(name, directions[n], truth.problem.signature)).sum())
        if abs(found - slope) <= allowed:
            return
    _need(
        abs(found - slope) <= allowed,
        f"slope {found:.9g} of the gradients, {slope:.9g} of the oracle, allowed {allowed:.1e}",
    )


def resets(backend: Backend, case: Case) -> None:
    """Nothing after a hard reset depends on anything before it, bit for bit.

    The sign of zeros is an exception: 0 times a negative state is -0.0, and a token that writes nothing keeps it.
    """
    case = replace(_whole_rows(_bare(case)), gate=None, gates="mild")
    inputs = build(case)
    _, T = _size(inputs)
    if "g" not in inputs.operands or T < 2:
        raise Void
    P = 1 + case.seed % (T - 1)
    g = np.array(inputs.operands["g"])
    g[:, P] = -np.inf if case.seed % 2 else -1e4
    inputs = inputs._replace(operands={**inputs.operands, "g": g})
    before = np.broadcast_to(np.arange(T) < P, (_size(inputs)[0], T))
    a, b = _run(backend, inputs), _run(backend, _changed(inputs, before, case.seed))
    (o, state), (other_o, other_state) = (
        (_unsigned_zeros(found["o"][:, P:]), _unsigned_zeros(found["state"])) for found in (a, b)
    )
    _need(_same_bits(o, other_o), f"what came before the reset at token {P} reaches outputs behind it")
    _need(_same_bits(state, other_state), f"what came before the reset at token {P} reaches the final state")


def _unsigned_zeros(a: np.ndarray) -> np.ndarray:
    return np.where(a == 0, np.zeros_like(a), a)


def tiny(backend: Backend, case: Case) -> None:
    """A call without tokens has no outputs and leaves states unchanged; a call of one token is within the budget."""
    case = replace(_whole_rows(case), gates="mild")
    none = build(replace(case, T=0))
    found = _run(backend, none)
    _need(found["o"].size == 0, f"no tokens, and o has shape {found['o'].shape}")
    start = none.operands.get("initial_state", np.zeros_like(found["state"]))
    _need(_same_bits(found["state"], np.asarray(start)), "no tokens, and the state is another")
    one = build(replace(case, T=1))
    _close(backend, one, _run(backend, one), "one token")


Property = Callable[[Backend, Case], None]

PROPERTIES: Mapping[str, Property] = {
    p.__name__: p
    for p in (
        oracle, causality, neighbours, packed_as_alone, splits, steps, permutations, scaling, dtypes,
        finite_differences, resets, tiny,
    )
}  # fmt: skip


# drawing -------------------------------------------------------------------------------------------------------------

VARIANTS = ("GDN", "KDA", "DeltaNet", "tile-grouped", "GDN-2", "GLA", "GLA (scalar)", "linear attention")
LAYOUTS = ("rows", "packed", "packed with empties", "segments", "left padding", "right padding", "holes")
GATES = (
    "mild",
    "zero",
    "half zero",
    "-3 each",
    "-20 each",
    "one -100",
    "one -1e6",
    "one -inf",
    "many resets",
    "strong",
)
KEYS = (("random", "random"), ("random", "0"), ("correlated 0.9", "1"), ("repeated", "1"), ("random", "1.998"))


def cases(few_shapes: bool = False) -> Any:
    """Return a hypothesis strategy of ``Case``, simplest first: failures shrink to few tokens, one head, plain gates.

    Args:
        few_shapes: whether to draw from a few shapes only, for backends that compile a program for each shape.
    """
    from hypothesis import strategies as st

    # Strategies are made once. Hypothesis would inspect every strategy that a draw makes, which takes longer than most
    # cases need to be computed.
    one = st.sampled_from
    if few_shapes:
        shapes = one([(1, 1, 1, 1, 8, 8), (5, 1, 1, 2, 16, 24), (33, 1, 2, 4, 16, 8), (65, 1, 1, 1, 24, 16)])
    else:
        tokens = st.integers(1, 70) | one((0, 1, 15, 16, 17, 63, 64, 65, 96, 130))
        heads, per_head = st.integers(1, 3), st.integers(1, 3)
        sizes = st.tuples(tokens, st.integers(1, 2), heads, per_head, st.integers(2, 16), st.integers(1, 32))
        shapes = sizes.map(lambda n: (n[0], n[1], n[2], n[2] * n[3], 2 * n[4], n[5]))
    layouts, keys, convs, variants = one(LAYOUTS), one(KEYS), one((None, None, None, 4)), one(VARIANTS)
    dtypes, gates, yes, orders = one(("float32", "bfloat16", "float16")), one(GATES), st.booleans(), one(("kv", "vk"))
    activations, seeds = one((None, None, "softplus", "bounded")), st.integers(0, 2**20)
    norms = one((None, "silu", "sigmoid", "alone"))

    @st.composite
    def draw_case(draw: Any) -> Case:
        T, B, H, HV, K, V = draw(shapes)
        layout, (key, beta), conv = draw(layouts), draw(keys), draw(convs)
        return Case(
            "drawn", draw(variants), T, draw(dtypes), B, H, HV, K, V, draw(gates), key, beta, layout, draw(yes),
            draw(orders), conv is not None or draw(yes), draw(activations), conv, seed=draw(seeds),
            norm=None if conv is None else draw(norms),
        )  # fmt: skip

    return draw_case().map(_sensible)


def _sensible(case: Case) -> Case:
    """Return a recipe that ``build`` can make: gates need decays, and some layouts and conditions are exclusive."""
    if case.variant in ("DeltaNet", "linear attention"):
        case = replace(case, gate=None)
    if case.variant == "linear attention":
        case = _bare(case)
    if case.layout in PACKED or case.T == 0:
        case = replace(case, B=1)
    if case.T == 0:
        case = replace(case, layout="rows")
    if case.conv is None and case.beta == "1.998" and case.l2norm:
        case = replace(case, beta="1")
    return case


def attempt(backend: Backend | str, name: str, case: Case) -> None:
    """Test one property of a backend on one case.

    Raises:
        Violation: the property does not hold.
        Refused: the backend does not compute such calls.
        Void: the property does not apply to this case.
    """
    if isinstance(backend, str):
        backend = dispatch.get(backend)
    with undisturbed():
        PROPERTIES[name](backend, case)


def hold(backend: Backend | str, name: str, case: Case) -> bool:
    """Test one property of a backend on one case, and return whether anything was computed and tested.

    Raises:
        Violation: the property does not hold.
    """
    try:
        attempt(backend, name, case)
    except (Refused, Void):
        return False
    return True
