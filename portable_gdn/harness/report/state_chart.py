"""The picture of what storing states in few bits costs: a dot a head and dtype, error over memory length, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import escape

from ...serving.at_rest import DTYPES
from ..state_errors import HeadStates

__all__ = ["state_chart"]

_COLOURS = {"float32": "#7f7f7f", "int16": "#1b9e77", "bfloat16": "#7570b3", "int8": "#d95f02"}
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 420, 64, 120, 34, 48
#: A head without decay stands where this many tokens would.
_LONGEST = 1e6


def state_chart(heads: Sequence[HeadStates], within: float, title: str) -> str:
    """A whole SVG file: relative error of outputs over memory length in tokens, both on log axes.

    Args:
        within: the error that the user states, drawn as a line.
    """
    lengths = [min(max(head.memory, 1e-2), _LONGEST) for head in heads]
    errors = [max(error, 1e-9) for head in heads for error in head.errors.values()]
    x_low, x_high = math.floor(math.log10(min(lengths))), math.ceil(math.log10(max(lengths)) + 1e-9)
    y_low = math.floor(math.log10(min([*errors, within])))
    y_high = math.ceil(math.log10(max([*errors, within])) + 1e-9)
    x_high, y_high = max(x_high, x_low + 1), max(y_high, y_low + 1)
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + across * (math.log10(value) - x_low) / (x_high - x_low)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - up * (math.log10(max(value, 1e-9)) - y_low) / (y_high - y_low)

    body = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for power in range(y_low, y_high + 1):
        at = y(10.0**power)
        body.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + across}" y1="{at:.1f}" y2="{at:.1f}"/>')
        body.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for power in range(x_low, x_high + 1):
        at, label = x(10.0**power), f"{10**power:,}" if power >= 0 else f"1e{power}"
        label = "no decay" if 10.0**power >= _LONGEST else label
        body.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_TOP + up}"/>')
        body.append(f'<text x="{at:.1f}" y="{_TOP + up + 18}" text-anchor="middle">{label}</text>')
    axis = "memory of a head in tokens; up: relative error of its outputs"
    body.append(f'<text x="{_LEFT + across / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{axis}</text>')
    limit = y(within)
    body.append(f'<line class="limit" x1="{_LEFT}" x2="{_LEFT + across}" y1="{limit:.1f}" y2="{limit:.1f}"/>')
    body.append(f'<text x="{_LEFT + across + 6}" y="{limit + 4:.1f}">within {within:g}</text>')
    for number, dtype in enumerate(DTYPES):
        place = _TOP + 12 + 18 * number
        body.append(f'<circle cx="{_LEFT + across + 14}" cy="{place - 4}" r="4" fill="{_COLOURS[dtype]}"/>')
        body.append(f'<text x="{_LEFT + across + 24}" y="{place}">{dtype}</text>')
        for head, length in zip(heads, lengths, strict=True):
            error = head.errors[dtype]
            tip = f"{head.call}, head {head.head}: {dtype} {error:.1e}, memory {head.memory:.3g} tokens"
            body.append(
                f'<circle cx="{x(length):.1f}" cy="{y(error):.1f}" r="3" fill="{_COLOURS[dtype]}" fill-opacity="0.7">'
                f"<title>{escape(tip)}</title></circle>"
            )
    style = (
        "text{font:12px sans-serif;fill:#222}.grid{stroke:#ccc}.limit{stroke:#c00;stroke-dasharray:6 4}"
        "@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#ddd}.grid{stroke:#444}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><style>{style}</style>' + "\n".join(body) + "</svg>\n"
    )
