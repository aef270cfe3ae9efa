"""Line charts as SVG, in text: they need no script and no library. Everything from outside is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 12, 28
_NAMED_LINES = 8


@dataclass(frozen=True, kw_only=True)
class Line:
    """name: for the legend and a pointer that rests on the line; values: None where there is a gap."""

    name: str
    values: Sequence[float | None]


def draw_chart(
    title: str,
    explanation: str,
    batches: Sequence[int],
    lines: Sequence[Line],
    axis: tuple[float, float] | None = None,
) -> str:
    """A `<figure>` with values over batches. `axis`: from where to where; None = as the values want it."""
    known = [value for line in lines for value in line.values if value is not None]
    low, high = axis if axis is not None and all(axis[0] <= v <= axis[1] for v in known) else _bounds(known)
    first, last = batches[0], max(batches[-1], batches[0] + 1)

    def x(batch: float) -> float:
        return round(LEFT + (batch - first) / (last - first) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:.4g}</text>')
    for batch in dict.fromkeys((batches[0], batches[len(batches) // 2], batches[-1])):
        parts.append(f'<text x="{x(batch)}" y="{HEIGHT - 8}" text-anchor="middle">{batch}</text>')
    for index, line in enumerate(lines):
        colour = colour_of(index, len(lines))
        shown = f"<title>{escape(line.name)}</title>"
        for part in _without_gaps(batches, line.values):
            points = " ".join(f"{x(batch)},{y(value)}" for batch, value in part)
            if len(part) == 1:
                cx, _, cy = points.partition(",")
                parts.append(f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{colour}">{shown}</circle>')
            else:
                parts.append(f'<polyline points="{points}" stroke="{colour}">{shown}</polyline>')
    parts.append("</svg>")
    caption = f"<figcaption><b>{escape(title)}</b> {escape(explanation)}</figcaption>"
    return f'<figure class="chart">{caption}{"".join(parts)}{_legend(lines)}</figure>'


def colour_of(index: int, number: int) -> str:
    """From violet to green: layers in their order."""
    share = index / max(1, number - 1)
    return f"hsl({round(285 - 165 * share)} 65% {round(48 - 6 * share)}%)"


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    step = 1 if len(lines) <= _NAMED_LINES else math.ceil((len(lines) - 1) / (_NAMED_LINES - 1))
    shown = sorted({*range(0, len(lines), step), len(lines) - 1})
    entries = (
        f'<span><svg class="key" viewBox="0 0 10 10"><rect width="10" height="10" fill="{colour_of(i, len(lines))}"/>'
        f"</svg>{escape(lines[i].name)}</span>"
        for i in shown
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _without_gaps(batches: Sequence[int], values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    parts: list[list[tuple[int, float]]] = [[]]
    for batch, value in zip(batches, values, strict=True):
        if value is None:
            parts.append([])
        else:
            parts[-1].append((batch, value))
    return [part for part in parts if part]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The axis: from 0 where that does not flatten the lines, and never of no height."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if 0 <= low < 0.7 * high or low == high == 0:
        low = 0.0
    if high - low <= 1e-9 * max(abs(high), 1.0):
        high = low + max(abs(low) * 0.1, 1e-3 if low else 1.0)
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
