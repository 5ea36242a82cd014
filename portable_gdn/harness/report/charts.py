"""Small charts as inline SVG. Colours are the page's own (CSS variables), so that they suit light and dark alike.

Two sides have two hues, always the same; a magnitude on a map is the strength of one hue. Every mark has a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

__all__ = ["bars", "error_map", "histogram", "stage_chart"]

_TINY = 1e-300


def _figure(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> Markup:
    return Markup(
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px">' + "".join(body) + "</svg>"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, x2: float, y1: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str, strength: float = 1.0) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" fill-opacity="{strength:.2f}" {at}><title>{escape(tip)}</title></rect>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Whole powers of ten below and above all positive values."""
    positive = [v for v in values if v > _TINY and math.isfinite(v)]
    if not positive:
        return -8, 0
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return low, max(high, low + 1)


def stage_chart(errors: Mapping[str, Mapping[str, tuple[float, float]]], order: Sequence[str]) -> Markup:
    """Error of each side at each stage as a dot on a log axis, its budget as a tick; by side, (error, budget)."""
    sides = list(errors)
    left, right, row, top = 76, 560, 17, 26
    low, high = _decades([x for side in errors.values() for pair in side.values() for x in pair])
    at = lambda v: left + (right - left) * (min(max(math.log10(max(v, _TINY)), low), high) - low) / (high - low)  # noqa: E731
    body = []
    height = top + len(order) * (row * len(sides) + 8) + 6
    step = max(1, (high - low) // 6)
    for power in range(low, high + 1, step):
        x = at(10.0**power)
        body.append(_line(x, x, top, height - 6, "grid"))
        body.append(_text(x, 14, f"1e{power}", "tick", "middle"))
    y = top + 4.0
    for stage in order:
        body.append(_text(left - 10, y + row * len(sides) / 2 + 4, stage, "label", "end"))
        for i, side in enumerate(sides):
            middle = y + row * i + row / 2
            if stage in errors[side]:
                error, budget = errors[side][stage]
                beyond = " beyond" if not error <= budget else ""
                tip = f"{side}, {stage}: error {_figure(error)}, budget {_figure(budget)}"
                marks = [
                    _line(at(budget), at(budget), middle - 6, middle + 6, "budget"),
                    _line(left, at(error), middle, middle, "stem"),
                    f'<circle cx="{at(error):.1f}" cy="{middle:.1f}" r="4.5"/>',
                ]
                body.append(f'<g class="side{i}{beyond}"><title>{escape(tip)}</title>{"".join(marks)}</g>')
        y += row * len(sides) + 8
    return _svg(right + 24, height, "error by stage", body)


def bars(values: Sequence[Sequence[float]], names: Sequence[str], what: str) -> Markup:
    """One thin bar chart with a group of bars, a side each, for every head, chunk or position; heights are linear."""
    count = len(values[0])
    width, height, left, bottom = 270.0, 92.0, 6.0, 14.0
    largest = max((v for side in values for v in side if math.isfinite(v)), default=0.0) or 1.0
    slot = (width - left) / max(count, 1)
    thick = max(min(slot / len(values) - 1, 12), 0.6)
    body = [
        _line(left, width, height - bottom, height - bottom, "axis"),
        _text(left, 10, f"max {_figure(largest)}", "tick"),
        _text(left, height - 2, "0", "tick"),
        _text(width, height - 2, str(count - 1), "tick", "end"),
    ]
    for i, side in enumerate(values):
        for j, v in enumerate(side):
            tall = (height - bottom - 16) * (min(v / largest, 1.0) if math.isfinite(v) else 1.0)
            x = left + slot * j + (slot - thick * len(values)) / 2 + thick * i
            tip = f"{what} {j}: {names[i]} {_figure(v)}"
            body.append(_rect(x, height - bottom - tall, max(thick - 0.5, 0.5), tall, f"side{i} bar", tip))
    return _svg(width, height, f"error by {what}", body)


def histogram(shares: Sequence[Mapping[str, float]], names: Sequence[str]) -> Markup:
    """Shares of elements by their distance in units in the last place, a bar a side."""
    kinds = list(shares[0])
    last = max((i for i, kind in enumerate(kinds) if any(s.get(kind, 0) > 5e-5 for s in shares)), default=0)
    kinds = kinds[: max(last + 1, 4)]
    width, height, bottom = 270.0, 92.0, 14.0
    slot, body = (
        width / len(kinds),
        [_line(0, width, height - bottom, height - bottom, "axis")],
    )
    thick = min(slot / len(shares) - 2, 12)
    for j, kind in enumerate(kinds):
        if len(kinds) <= 8 or j % 2 == 0:
            label = kind if kind in ("0", "more") else f"≤{kind}"
            half = 3.0 * len(label)  # of its width, about: at the edges it must not be cut off
            x = min(max(slot * (j + 0.5), half), width - half)
            body.append(_text(x, height - 2, label, "tick", "middle"))
        for i, side in enumerate(shares):
            share = side.get(kind, 0.0)
            tall = (height - bottom - 8) * share
            x = slot * j + (slot - thick * len(shares)) / 2 + thick * i
            tip = f"{names[i]}: {100 * share:.2f} % off by {kind} ulp"
            body.append(_rect(x, height - bottom - tall, thick - 1, tall, f"side{i} bar", tip))
    return _svg(width, height, "distance in units in the last place", body)


def error_map(table: Sequence[Sequence[float]], tokens: int, scale: tuple[float, float], side: int) -> Markup:
    """Error by token (down) and head (across), on a log scale from the faintest to the strongest of one hue."""
    rows, heads = len(table), max(len(table[0]), 1)
    wide, tall = min(36.0, 232.0 / heads), min(14.0, max(1.5, 200.0 / rows))
    left, top = 40.0, 16.0
    low, high = (math.log10(max(x, _TINY)) for x in scale)
    body = [_text(left, 10, "head 0", "tick"), _text(left - 6, top + 9, "0", "tick", "end")]
    if heads > 1:
        body.append(_text(left + wide * heads, 10, str(heads - 1), "tick", "end"))
    if rows > 1:
        body.append(_text(left - 6, top + tall * rows, str(tokens - 1), "tick", "end"))
    body.append(f'<rect class="frame" x="{left}" y="{top}" width="{wide * heads:.1f}" height="{tall * rows:.1f}"/>')
    for i, row in enumerate(table):
        for j, v in enumerate(row):
            if not v > _TINY and math.isfinite(v):
                continue
            strength = 1.0 if not math.isfinite(v) or high <= low else (math.log10(v) - low) / (high - low)
            strength = 0.06 + 0.94 * min(max(strength, 0.0), 1.0)
            tip = f"token {i * tokens // rows}, head {j}: {_figure(v)}"
            body.append(_rect(left + wide * j, top + tall * i, wide, tall + 0.2, f"side{side}", tip, strength))
    return _svg(left + wide * heads + 6, top + tall * rows + 4, "error by token and head", body)
