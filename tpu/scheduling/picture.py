"""A compiled kernel as a picture: which units work in which part of a grid step, as one SVG for light and dark."""

from __future__ import annotations

from markupsafe import escape

from ..chips import chip_named
from .report import OperationReport, Schedule

__all__ = ["picture"]

_LEFT, _WIDTH, _ROW, _HEAD = 90, 720, 20, 46
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.dim{fill:#777;font-size:12px}.use{fill:#3f51b5}.row{fill:#f0f1f6}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.dim{fill:#999}.use{fill:#8c9eff}.row{fill:#2a2d36}}"
)


def picture(schedule: Schedule) -> str:
    """An SVG with a strip per unit and kernel; the stronger its colour, the more of the unit's slots are taken there.

    The axis is one full grid step, in cycles (the whole run, where a kernel has no steps). Kernels without an
    instruction are left out.
    """
    parts: list[str] = []
    y = 10
    for kernel in schedule.kernels:
        if kernel.timeline:
            y = _kernel(parts, kernel, schedule.chip, y)
    width = _LEFT + _WIDTH + 60
    label = f"Use of each unit over a grid step, {schedule.chip}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width} {y}" width="{width}" height="{y}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _kernel(parts: list[str], kernel: OperationReport, chip: str, y: int) -> int:
    """Draws one kernel from y on, and returns where the next one begins."""
    cycles = kernel.bundles_per_step or kernel.cycles or 0
    micro = cycles / chip_named(chip).clock_hz * 1e6
    span = "of a grid step" if kernel.steps else "of the kernel"
    parts.append(f'<text x="{_LEFT}" y="{y + 14}">{escape(kernel.name)} on {chip}: {cycles:,} cycles {span}</text>')
    parts.append(f'<text class="dim" x="{_LEFT}" y="{y + 32}">0</text>')
    end = f"{cycles:,} cycles, {micro:.1f} us"
    parts.append(f'<text class="dim" x="{_LEFT + _WIDTH}" y="{y + 32}" text-anchor="end">{end}</text>')
    y += _HEAD - 8
    for unit, use in (kernel.timeline or {}).items():
        mean = sum(use) / len(use)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(unit)}</text>')
        parts.append(f'<rect class="row" x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW - 3}"/>')
        wide = _WIDTH / len(use)
        for i, share in enumerate(use):
            if share >= 0.005:
                parts.append(
                    f'<rect class="use" x="{_LEFT + i * wide:.1f}" y="{y}" width="{wide:.1f}" height="{_ROW - 3}" '
                    f'fill-opacity="{min(1.0, share):.2f}"/>'
                )
        parts.append(f'<text class="dim" x="{_LEFT + _WIDTH + 6}" y="{y + 14}">{100 * mean:.0f} %</text>')
        y += _ROW
    return y + 16
