"""Draws loads with matplotlib: heat maps and line charts, as SVG text or as a PNG file.

Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

_VALUES_UP_TO = 16  # experts; with more, numbers do not fit their cells
_NAMES_UP_TO = 48  # layers; of more, every second, third, ... has a label
_LEGEND_UP_TO = 8  # lines
_DOTS_UP_TO = 24  # points of a line
MAPS_OVER_TIME = 64  # layers
_COLUMNS = 4  # maps over time in a row


def draw_loads(maps: Mapping[str, NDArray[np.float64]], names: Sequence[str]) -> Figure:
    """Heat maps of loads over their layer's mean: a row a layer, a column an expert.

    Args:
        maps: [L, E] by title, one below the other.
        names: of the layers.
    """
    layers, experts = next(iter(maps.values())).shape
    height = max(2.2, 0.24 * min(layers, _NAMES_UP_TO) + 1.3)
    figure = Figure(figsize=(3.0 + 0.6 * min(experts, _VALUES_UP_TO), height * len(maps)), layout="constrained")
    axes = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    for (title, relative_LE), place in zip(maps.items(), axes, strict=True):
        image = _draw_map(place, relative_LE, title)
        place.set(xlabel="expert")
        step = -(-layers // _NAMES_UP_TO)
        place.set_yticks(range(0, layers, step), names[::step])
        if experts <= _VALUES_UP_TO and layers <= _NAMES_UP_TO:
            place.set_xticks(range(experts))
            for (row, column), value in np.ndenumerate(relative_LE):
                colour = "white" if abs(value - 1) > 0.6 else "black"
                place.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    _draw_scale(figure, image, list(axes))
    return figure


def draw_over_time(relative_NLE: NDArray[np.float64], ends: Sequence[int], names: Sequence[str]) -> Figure:
    """A heat map a layer: a row an expert, a column a point in time; at most MAPS_OVER_TIME layers, evenly chosen."""
    shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), MAPS_OVER_TIME)).round().astype(int))
    rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(3.2 * _COLUMNS, 1.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False)
    for place in axes.flat[len(shown) :]:
        place.set_axis_off()
    ticks = np.unique([0, len(ends) // 2, len(ends) - 1])
    for layer, place in zip(shown, axes.flat, strict=False):
        image = _draw_map(place, relative_NLE[:, layer].T, names[layer])
        place.set_xticks(ticks, [str(ends[tick]) for tick in ticks])
        place.set_ylabel("expert", fontsize=8)
        place.tick_params(labelsize=7)
    _draw_scale(figure, image, axes.ravel().tolist())
    return figure


def draw_lines(
    charts: Mapping[str, Mapping[str, NDArray[np.float64]]], ends: Sequence[int], shares: Collection[str] = ()
) -> Figure:
    """Line charts over batches, two in a row.

    Args:
        charts: by title, lines [N] by name; NaN is a gap.
        shares: titles of charts whose axis is 0 to 1.
    """
    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(12.8, 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    for place in axes.flat[len(charts) :]:
        place.set_axis_off()
    for (title, lines), place in zip(charts.items(), axes.flat, strict=False):
        step = max(1, -(-len(lines) // _LEGEND_UP_TO))
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(lines)))
        for number, (name, values) in enumerate(lines.items()):
            label = name if number % step == 0 or number == len(lines) - 1 else "_"
            dots = "." if len(ends) <= _DOTS_UP_TO or np.isnan(values).any() else ""  # one point has no line
            place.plot(ends, values, color=colours[number], marker=dots, linewidth=1.2, label=label)
        if title in shares and all(np.nanmax(values) <= 1.001 for values in lines.values()):
            place.set_ylim(0, 1.05)
        place.set_title(title, fontsize=9)
        place.tick_params(labelsize=8)
        place.grid(alpha=0.3)
        if len(lines) > 1:
            place.legend(fontsize=7, ncols=2, framealpha=0.6)
    return figure


def to_svg(figure: Figure) -> str:
    """An `<svg>` element for an HTML page. It refers to nothing outside itself; text from a run is escaped."""
    out = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # no block of links to vocabularies
    with rc_context({"text.parse_math": False, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata=metadata)
    text = out.getvalue()
    return text[text.index("<svg") :]


def save_png(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_map(place: Any, relative: NDArray[np.float64], title: str) -> Any:
    place.set_title(title, fontsize=9)
    return place.imshow(relative, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")


def _draw_scale(figure: Figure, image: Any, axes: list[Any]) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 1, 2])
    bar.ax.set_yticklabels(["0", "1: even", "2 and more"], fontsize=8)
