"""One HTML file of a run's loads: a verdict, curves and heat maps. It embeds Bokeh's script and loads nothing.

Text from the run is escaped. Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.layouts import column, gridplot
from bokeh.models import DataRange1d, FixedTicker, HoverTool, LinearAxis, LinearColorMapper, Range1d
from bokeh.models.annotations import ColorBar
from bokeh.palettes import RdBu11
from bokeh.plotting import figure
from bokeh.resources import Resources
from numpy.typing import NDArray

from foundry_moe.loads.history import LoadHistory, collapse_entropy, entropy_of, over_mean, read_history
from foundry_moe.schema import UserError

_LISTED = 8  # layers in the verdict
_MAPS_OVER_TIME = 64  # layers
_LABELS = 64  # of a heat map's rows
_ROW_PIXELS = 13  # a label of 9 px needs as many
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #fff; max-width: 1120px; margin: 0 auto;
  padding: 24px; }
h1, h2 { font-size: 20px; margin: 24px 0 4px; }
.bad { color: #b3261e; }
.good { color: #1b7f4b; }
"""


def write_page(source: Path, target: Path) -> int:
    """Reads a file of `callbacks.expert_load.file` and writes the page. Returns the number of lines.

    Raises:
        ValueError: see `read_history`; or the page cannot be written.
    """
    history = read_history(source)
    text = render(history, title=source.name)
    try:
        if target.resolve() == source.resolve():
            raise UserError(f"--html ({target}) is the file of loads itself: give another path")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from error
    return history.lines


def loads_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe loads`."""
    target = arguments.html or arguments.file.parent / f"{arguments.file.stem}.html"
    print(f"wrote {target}: {write_page(arguments.file, target)} lines")
    return 0


def render(history: LoadHistory, *, title: str) -> str:
    """The page as text."""
    layers, loads_NLE, ends = history.layers, history.loads_NLE, history.ends
    experts, relative_NLE = loads_NLE.shape[-1], over_mean(loads_NLE)
    shown = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _MAPS_OVER_TIME)).round().astype(int))
    over_time: list[Any] = [_over_time(relative_NLE[:, index].T, f"layer {layers[index]}", ends) for index in shown]
    some = f" ({len(shown)} of {len(layers)} layers)" if len(shown) < len(layers) else ""
    sections = {
        "Imbalance and loss": _curves(history, relative_NLE),
        "Load of each expert, over its layer's mean": column(
            _of_layers(over_mean(loads_NLE.sum(0)), layers, "whole run"),
            _of_layers(relative_NLE[-1], layers, f"last point, up to batch {ends[-1]}"),
        ),
        f"Load of each expert over time{some}": gridplot(over_time, ncols=4, toolbar_location=None),
    }
    script, parts = components(list(sections.values()))
    merged = f"; each point is the sum of {history.lines_a_point} lines" if history.lines_a_point > 1 else ""
    facts = (
        f"Up to batch {ends[-1]}: {len(layers)} layers of {experts} experts, {history.lines} lines{merged}. "
        "Point at a curve or a cell for its values."
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Expert load: {escape(title)}</title>\n<style>{_STYLE}</style>",
            f"{Resources(mode='inline', components=['bokeh']).render()}</head><body>",
            f"<h1>Expert load: {escape(title)}</h1>\n<p>{facts}</p>\n{_verdict(history)}\n{_meaning(history)}",
            *(f"<h2>{escape(heading)}</h2>\n{part}" for heading, part in zip(sections, parts, strict=True)),
            f"{script}\n</body></html>\n",
        )
    )


def _meaning(history: LoadHistory) -> str:
    experts, top_k = history.last_LE.shape[1], history.points[-1].top_k
    few = f"{(top_k * experts) ** 0.5:.0f} of its {experts}"
    return (
        f"<p>A layer collapses if the entropy of its loads over log {experts} is below "
        f"{collapse_entropy(experts, top_k):.2g}, as if only {few} experts had tokens, each of which has "
        f"{top_k}: raise loss.balance or lower the learning rate. The last line covers the "
        "batches since the line before it. MaxVio is the load of a layer's fullest expert over the mean, minus 1: 0 = "
        "even, 1 = twice the mean. Heat maps show loads over the mean: white = even, blue = less, red = more, dark red "
        "= twice the mean and more.</p>"
    )


def _verdict(history: LoadHistory) -> str:
    """The layers that have collapsed or have unused experts in the last line."""
    problems = []
    for layer, loads_E in zip(history.layers, history.last_LE, strict=True):
        entropy, unused = entropy_of(loads_E), int((loads_E == 0).sum())
        if entropy < collapse_entropy(len(loads_E), history.points[-1].top_k):
            problems.append(f"Layer {layer} collapses onto few experts: the entropy of its loads is {entropy:.2f}.")
        elif unused:
            problems.append(f"Layer {layer}: experts without a token: {unused}.")
    if len(problems) > _LISTED:
        problems[_LISTED:] = [f"{len(problems) - _LISTED} more layers like these."]
    if problems:
        return f'<ul class="bad">{"".join(f"<li>{escape(problem)}</li>" for problem in problems)}</ul>'
    return '<p class="good">In the last line every expert had tokens.</p>'


def _curves(history: LoadHistory, relative_NLE: NDArray[np.float64]) -> figure:
    """The worst and the mean MaxVio of the layers, and the training loss if the file has it, over batches."""
    violation_NL = relative_NLE.max(-1) - 1
    losses = [point.loss for point in history.points]
    data = {
        "batch": history.ends,
        "worst": violation_NL.max(1),
        "mean": violation_NL.mean(1),
        "layer": [history.layers[index] for index in violation_NL.argmax(1)],
        "loss": losses,
    }
    violation, loss = DataRange1d(start=0), DataRange1d()
    plot = figure(
        width=1080,
        height=280,
        x_axis_label="batch",
        y_axis_label="MaxVio",
        y_range=violation,
        tools="pan,wheel_zoom,reset",
    )
    named = {"worst": ("worst MaxVio of a layer", "#b3261e"), "mean": ("mean MaxVio", "#e08e45")}
    tooltips = [("batch", "@batch"), ("worst MaxVio", "@worst{0.00} (layer @layer)"), ("mean MaxVio", "@mean{0.00}")]
    lines: list[Any] = [
        plot.line("batch", name, source=data, legend_label=label, color=color, line_width=2)
        for name, (label, color) in named.items()
    ]
    violation.renderers = lines
    if not np.isnan(losses).all():
        plot.extra_y_ranges = {"loss": loss}
        plot.add_layout(LinearAxis(y_range_name="loss", axis_label="loss"), "right")
        style: dict[str, Any] = {"legend_label": "loss", "color": "#2f6db3", "line_width": 2}
        loss.renderers = [plot.line("batch", "loss", source=data, y_range_name="loss", **style)]
        tooltips.append(("loss", "@loss{0.000}"))
    plot.legend.orientation = "horizontal"
    plot.add_layout(plot.legend[0], "above")
    plot.add_tools(HoverTool(renderers=lines[:1], tooltips=tooltips, mode="vline"))
    return plot


def _colours() -> LinearColorMapper:
    return LinearColorMapper(palette=RdBu11, low=0, high=2)


def _of_layers(relative_LE: NDArray[np.float64], layers: Sequence[int], title: str) -> figure:
    rows, experts = relative_LE.shape
    plot = figure(
        width=1080,
        height=90 + _ROW_PIXELS * min(max(rows, 4), _LABELS),
        title=title,
        x_axis_label="expert",
        y_axis_label="layer",
        x_range=Range1d(start=-0.5, end=experts - 0.5),
        y_range=Range1d(start=rows - 0.5, end=-0.5),
        tools="pan,wheel_zoom,reset",
        tooltips=[("layer", "@layer"), ("expert", "$x{0}"), ("load over mean", "@image{0.00}")],
    )
    colours = _colours()
    names_LE = np.repeat(np.array(layers, dtype=np.int32)[:, None], experts, axis=1)
    data = {"image": [relative_LE.astype(np.float32)], "layer": [names_LE]}
    plot.image(source=data, x=-0.5, y=-0.5, dw=experts, dh=rows, color_mapper=colours)
    plot.add_layout(ColorBar(color_mapper=colours, ticker=FixedTicker(ticks=[0, 1, 2]), width=12), "right")
    ticks = list(range(0, rows, -(-rows // _LABELS)))
    plot.yaxis.ticker = FixedTicker(ticks=ticks)
    plot.yaxis.major_label_overrides = {tick: str(layers[tick]) for tick in ticks}
    plot.yaxis.major_label_text_font_size = "9px"
    return plot


def _over_time(relative_EN: NDArray[np.float64], title: str, ends: Sequence[int]) -> figure:
    experts = len(relative_EN)
    begin = max(2 * ends[0] - ends[1], 0) if ends[1:] else 0  # of the first point, as if the second were as long
    plot = figure(
        width=270,
        height=190,
        title=title,
        x_axis_label="batch",
        y_axis_label="expert",
        x_range=Range1d(start=begin, end=ends[-1]),
        y_range=Range1d(start=experts - 0.5, end=-0.5),
        toolbar_location=None,
        tools="",
        tooltips=[("batch", "$x{0}"), ("expert", "$y{0}"), ("load over mean", "@image{0.00}")],
    )
    columns = [column_E[:, None].astype(np.float32) for column_E in relative_EN.T]
    data = {"image": columns, "x": [begin, *ends[:-1]], "dw": np.diff([begin, *ends])}  # points differ in length
    plot.image(source=data, x="x", y=-0.5, dw="dw", dh=experts, color_mapper=_colours())
    return plot
