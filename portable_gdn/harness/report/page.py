"""What the page shows, chosen from a comparison."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from ... import __version__
from ...spec.stages import STAGES
from ..compare import CaseComparison, Comparison, TensorComparison
from ..statistics import Statistics
from . import charts

__all__ = ["page"]

SHOWN = 6  # tensors whose error is mapped: those that fail, then those that use most of their budget


def page(found: Comparison) -> str:
    """The comparison as one HTML file."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__, "."), autoescape=True)
    environment.filters["figure"] = lambda x: "0" if x == 0 else f"{x:.1e}"
    return environment.get_template("page.html.j2").render(
        found=found,
        sentence=found.sentence(),
        rows=[_row(case, t) for case in found.cases for t in case.tensors],
        partings=[(case.case, case.parting.sentence(*case.apart)) for case in found.cases if case.parting is not None],
        remarks=Counter(remark for case in found.cases if not case.ok for remark in case.remarks).most_common(),
        stages=[(case.case, charts.stage_chart(case.errors, STAGES)) for case in _with_stages(found)],
        maps=[_map(found, case, t) for case, t in _worst(found)],
        served=_served(found),
        environments=_environments(found),
        budgets=sorted({budget for case in found.cases for budget in case.budgets}),
        made=f"portable-gdn {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _share(t: TensorComparison) -> float:
    """Used of the tightest budget."""
    pairs = ((t.difference, t.budget), (t.a.error, t.a.budget), (t.b.error, t.b.budget))
    return max(
        (error / budget if budget else (0.0 if error == 0 else float("inf")) for error, budget in pairs), default=0.0
    )


def _row(case: CaseComparison, t: TensorComparison) -> dict[str, Any]:
    return {
        "case": case.case,
        "variant": case.variant,
        "t": t,
        "share": _share(t),
        "verdict": "differs" if not t.holds else "equal" if t.judged else "not judged",
    }


def _with_stages(found: Comparison) -> list[CaseComparison]:
    """Cases whose stages are drawn: those that part, and one that does not."""
    have = [case for case in found.cases if case.errors]
    apart = [case for case in have if case.parting is not None or not case.ok]
    return (apart or have)[:3]


def _worst(found: Comparison) -> list[tuple[CaseComparison, TensorComparison]]:
    pairs = [(case, t) for case in found.cases for t in case.tensors if t.tensor in case.statistics]
    few = lambda case, t: case.statistics[t.tensor][0].tokens < 8  # noqa: E731
    pairs.sort(key=lambda pair: (pair[1].holds, not pair[1].judged, few(*pair), -_share(pair[1])))
    chosen: list[tuple[CaseComparison, TensorComparison]] = []
    for pair in pairs:  # of one case no more than two, so that others are seen too
        if sum(case.case == pair[0].case for case, _ in chosen) < 2:
            chosen.append(pair)
    return chosen[:SHOWN]


def _map(found: Comparison, case: CaseComparison, t: TensorComparison) -> dict[str, Any]:
    pair: tuple[Statistics, Statistics] = case.statistics[t.tensor]
    names = (found.a.label, found.b.label)
    values = [v for x in pair for row in x.by_token for v in row if 0 < v < float("inf")]
    scale = (min(values, default=1e-9), max(values, default=1.0))
    scale = (max(scale[0], scale[1] * 1e-4), scale[1])
    return {
        "case": case.case,
        "t": t,
        "holds": t.holds,
        "scale": scale,
        "maps": [charts.error_map(x.by_token, x.tokens, scale, i) for i, x in enumerate(pair)],
        "bars": [
            (what, charts.bars([getattr(x, name) for x in pair], names, what))
            for what, name in (("head", "by_head"), ("chunk", "by_chunk"), ("position in a chunk", "by_position"))
            if len(getattr(pair[0], name)) > 1
        ],
        "ulps": charts.histogram([x.ulps for x in pair], names),
        "drift": [x.drift for x in pair],
        "bias": [x.bias for x in pair],
        "findings": [(names[i], finding) for i in t.suspects for finding in pair[i].findings],
    }


def _served(found: Comparison) -> list[tuple[str, list[tuple[str, int]]]]:
    """What computed the cases of each side that tells, and how many of them."""
    sides = []
    for i, side in enumerate((found.a, found.b)):
        counts = Counter(line for case in found.cases for line in case.served[i])
        if counts:
            sides.append((side.label, sorted(counts.items())))
    return sides


def _environments(found: Comparison) -> list[tuple[str, str, str, bool]]:
    """Facts of both sides, line by line, and whether they differ."""

    def flat(facts: Any, prefix: str = "") -> dict[str, str]:
        if not isinstance(facts, dict):
            return {prefix: ", ".join(map(str, facts)) if isinstance(facts, list) else str(facts)}
        lines: dict[str, str] = {}
        for name, value in facts.items():
            lines |= flat(value, f"{prefix} {name}".strip())
        return lines

    tables = []
    for side in (found.a, found.b):
        settings = {name: value for name, value in side.settings.items() if value not in (None, False)}
        tables.append(
            {"backend": side.backend, "recorded": side.created, **flat({"set": settings, **side.environment})}
        )
    names = list(dict.fromkeys([*tables[0], *tables[1]]))
    return [
        (name, *(table.get(name, "") for table in tables), tables[0].get(name) != tables[1].get(name))  # type: ignore[misc]
        for name in names
    ]
