"""Groups of failures that are likely one fault, by backend and tensors, with what the failing cases have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from . import recordings
from .cases import PACKED, Case
from .row import Row
from .statistics import and_list

__all__ = ["Group", "groups"]


class Group(NamedTuple):
    """Failures that are likely one fault.

    ``tensors`` are those that fail in exactly these cases. ``cases`` says how many fail, of how many that were judged.
    ``cause`` is what all of them have in common and no passing case has, or what most of them have in common, or "".
    ``first`` is the first token beyond its budget in most of them, with its head, or "". ``worst`` is the row that
    exceeds its budget the most.
    """

    backend: str
    tensors: tuple[str, ...]
    failing: tuple[str, ...]
    judged: int
    cause: str
    first: str
    worst: Row

    def sentence(self) -> str:
        """Return the group as a sentence of one line."""
        row = self.worst
        count = f"{len(self.failing)} of {self.judged} case{'' if self.judged == 1 else 's'}"
        parts = [f"{self.backend}: {', '.join(self.tensors)} in {count}"]
        parts += [f"({', '.join(self.failing)})"] if len(self.failing) < 4 and not self.cause else []
        said = " ".join(parts) + (f": {self.cause}" if self.cause else "")
        said += f"; {self.first}" if self.first else ""
        note = f", {row.note}" if row.note else ""
        return f"{said}; worst: {row.case}, {row.tensor}: error {row.error:.1e}, budget {row.budget:.1e}{note}"


class _Facts(NamedTuple):
    """The properties of a case that may make a backend fail."""

    variant: str
    dtype: str
    layout: str
    tokens: int
    case: Case


@cache
def _facts(case: Case) -> _Facts:
    """Return the facts of a case; those of a recorded layer come from its file."""
    tokens, variant, layout = case.T, case.variant, case.layout
    if case.source is not None:
        path = next(p for p in recordings.bundled() if p.name == case.source)
        recording = recordings.load(path)
        tokens, heads = recording.arrays[case.prefix + "q"].shape[1:3]
        value_heads, K = recording.arrays[case.prefix + "v"].shape[2], recording.arrays[case.prefix + "k"].shape[3]
        variant = {"gdn": "GDN", "kda": "KDA"}[recording.metadata["variant"]]
        has_state = case.prefix + "initial_state" in recording.arrays
        case = Case(case.name, variant, tokens, H=heads, HV=value_heads, K=K, state=has_state)
    elif layout in PACKED:
        tokens = max(PACKED[layout])
    return _Facts(variant, case.dtype, layout, tokens, case)


Test = Callable[[_Facts], bool]


def _candidates(facts: Sequence[_Facts]) -> Iterator[tuple[str, Test]]:
    """Yield what failing cases may have in common, the likeliest first, as words and a test."""

    def longer(n: int) -> Test:
        return lambda f: f.tokens > n

    def equal(value: str, of: Callable[[_Facts], str]) -> Test:
        return lambda f: of(f) == value

    yield "every case", lambda f: True
    for n in (64, 63, 1, 0, 128, 16, 32, *sorted({f.tokens for f in facts})):
        yield f"every case with more than {'one token' if n == 1 else f'{n} tokens'}", longer(n)
    yield "every case with value heads that share a key head", lambda f: f.case.HV > f.case.H
    yield "every case with an initial state", lambda f: f.case.state
    yield "every case without an initial state", lambda f: not f.case.state
    yield "every packed case", lambda f: f.layout in PACKED
    yield "every case that is not packed", lambda f: f.layout not in PACKED
    yield "every case with padding", lambda f: f.layout in ("left padding", "right padding", "holes")
    yield "every case with segments", lambda f: f.layout == "segments"
    yield "every single step", lambda f: f.layout == "step"
    yield "every case with states [V, K]", lambda f: f.case.state_layout == "vk"
    yield "every case with hard resets", lambda f: f.case.gates in ("one -1e6", "one -inf", "many resets", "strong")
    yield "every case with a gate inside the call", lambda f: f.case.gate is not None
    yield "every case with a convolution", lambda f: f.case.conv is not None
    yield "every case with normalisation inside the call", lambda f: f.case.l2norm
    yield "every case with several rows", lambda f: f.case.B > 1
    for dtype in ("float32", "bfloat16", "float16"):
        yield f"every case in {dtype}", equal(dtype, lambda f: f.dtype)
    yield "every case in 16 bits", lambda f: f.dtype != "float32"
    for variant in dict.fromkeys(f.variant for f in facts):
        yield f"every case of {variant}", equal(variant, lambda f: f.variant)
    yield "every case with a decay for each channel", lambda f: f.variant in ("KDA", "GDN-2", "GLA")
    for gates in dict.fromkeys(f.case.gates for f in facts):
        yield f"every case with gates {gates}", equal(gates, lambda f: f.case.gates)


def _cause(failing: Sequence[_Facts], holding: Sequence[_Facts]) -> str:
    """Return what only the failing cases have in common, or what they share with some cases that pass."""
    if not holding:
        return "every case" if len(failing) > 1 else ""
    tests = list(_candidates([*failing, *holding]))
    if len(failing) > 1:
        for words, test in tests:
            if all(map(test, failing)) and not any(map(test, holding)):
                return words
        for i, (words, test) in enumerate(tests[1:], 1):  # two conditions together
            if all(map(test, failing)):
                for more, other in tests[i + 1 :]:
                    if all(map(other, failing)) and not any(test(f) and other(f) for f in holding):
                        return f"{words} and {more.removeprefix('every case ').removeprefix('every ')}"
    shared = [
        (sum(map(test, holding)), words) for words, test in tests[1:] if len(failing) > 1 and all(map(test, failing))
    ]
    least, words = min(shared, default=(len(holding), ""))
    if words and 2 * least < len(holding):
        return f"{words}, but for {least}".replace("every", "almost every", 1) if least else words
    return ""


def _first(rows: Sequence[Row]) -> str:
    """Return the place at which most rows first exceed their budget."""
    places = [(row.token, row.token_head) for row in rows if row.token is not None]
    if not places:
        return ""
    tokens = [token for token, _ in places]
    common = max(dict.fromkeys(tokens), key=tokens.count)
    heads = sorted({head for token, head in places if token == common and head is not None})
    last = all(row.tensor.startswith("grad_") for row in rows)  # the fault of a gradient begins at the last token
    said = f"{'last' if last else 'first'} token beyond its budget: {common}"
    said += f", head{'' if len(heads) == 1 else 's'} {and_list(list(map(str, heads[:6])))}"
    same = tokens.count(common)
    return said if same == len(tokens) else f"{said} (in {same} of {len(tokens)}; in others {_range(tokens, common)})"


def _range(tokens: Sequence[int], common: int) -> str:
    others = sorted(set(tokens) - {common})
    return str(others[0]) if len(others) == 1 else f"{others[0]} to {others[-1]}"


def groups(rows: Sequence[Row], cases: Sequence[Case]) -> list[Group]:
    """Group the failing rows, and return the largest group first.

    Args:
        rows: the rows of a report, including those that pass.
        cases: the recipes of the rows' cases.
    """
    recipes = {case.name: case for case in cases}
    by_tensor: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.judged or not row.ok:
            by_tensor.setdefault((row.backend, row.tensor), []).append(row)
    together: dict[tuple[str, tuple[str, ...]], list[tuple[str, list[Row], list[Row]]]] = {}
    for (backend, tensor), of in by_tensor.items():
        bad = [row for row in of if not row.ok]
        if bad:
            key = backend, _cause_key(bad, of, recipes)
            together.setdefault(key, []).append((tensor, bad, of))
    found = []
    for (backend, _), members in together.items():
        bad = [row for _, rows_, _ in members for row in rows_]
        names = tuple(dict.fromkeys(row.case for row in bad))
        judged = {row.case for _, _, of in members for row in of}
        facts = {name: _facts(recipes[name]) for name in judged if name in recipes}
        failing = [facts[name] for name in names if name in facts]
        cause = _cause(failing, [f for name, f in facts.items() if name not in names])
        worst = max(bad, key=lambda row: row.error / row.budget if row.budget else np.inf)
        outputs = [row for row in bad if not row.tensor.startswith("grad_")]
        tensors = tuple(tensor for tensor, _, _ in members)
        found.append(Group(backend, tensors, names, len(judged), cause, _first(outputs or bad), worst))
    return sorted(found, key=lambda group: -len(group.failing))


def _cause_key(bad: Sequence[Row], of: Sequence[Row], recipes: dict[str, Case]) -> tuple[str, ...]:
    """Return a key that tensors share if their failures have one cause or, if none is found, are in the same cases."""
    names = {row.case for row in bad}
    failing = [_facts(recipes[name]) for name in names if name in recipes]
    holding = [_facts(recipes[row.case]) for row in of if row.case not in names and row.case in recipes]
    cause = _cause(failing, holding)
    return (cause.removeprefix("almost ").partition(", but for")[0],) if cause else tuple(sorted(names))
