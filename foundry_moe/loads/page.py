"""One HTML file of a run's loads: a verdict and heat maps. It has no script and loads nothing.

Text from the run is escaped. Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from foundry_moe.loads.history import EVEN_ENOUGH, LoadHistory, entropy_of, over_mean, read_history
from foundry_moe.schema import UserError

_LISTED = 8  # layers in the verdict
_MAPS_OVER_TIME = 64  # layers
_LABELS = 48  # of a heat map's rows
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #fff; max-width: 1120px; margin: 0 auto;
  padding: 24px; }
h1, h2 { font-size: 20px; margin: 24px 0 4px; }
svg { max-width: 100%; height: auto; }
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
    names = [f"layer {layer}" for layer in history.last.layers]
    last = f"last point, up to batch {history.ends[-1]}"
    overview = {"whole run": over_mean(history.loads_NLE.sum(0)), last: over_mean(history.loads_NLE[-1])}
    relative_LEN = over_mean(history.loads_NLE).transpose(1, 2, 0)
    shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), _MAPS_OVER_TIME)).round().astype(int))
    some = f" ({len(shown)} of {len(names)} layers)" if len(shown) < len(names) else ""
    over_time = {names[layer]: relative_LEN[layer] for layer in shown}
    sections = {
        "Load of each expert, over its layer's mean": draw_maps(overview, rows=names),
        f"Load of each expert over time{some}": draw_maps(over_time, columns=4, ends=history.ends),
    }
    merged = f"; each point is the sum of {history.lines_a_point} lines" if history.lines_a_point > 1 else ""
    facts = (
        f"Up to batch {history.ends[-1]}: {len(names)} layers of {history.loads_NLE.shape[-1]} experts, "
        f"{history.lines} lines{merged}."
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # heat maps are images inside the SVG
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Expert load: {escape(title)}</title>\n<style>{_STYLE}</style></head><body>",
            f"<h1>Expert load: {escape(title)}</h1>\n<p>{facts}</p>\n{_verdict(history)}",
            *(f"<h2>{escape(heading)}</h2>\n{to_svg(figure)}" for heading, figure in sections.items()),
            "</body></html>\n",
        )
    )


def _verdict(history: LoadHistory) -> str:
    """Choices dropped in the run, and the layers that have collapsed or have unused experts in the last line."""
    layers = history.last.layers
    problems = []
    for layer, loads_E in zip(layers, history.last.loads_LE, strict=True):
        entropy, unused = entropy_of(loads_E), int((loads_E == 0).sum())
        if entropy < EVEN_ENOUGH:
            problems.append(f"Layer {layer} collapses onto few experts: the entropy of its loads is {entropy:.2f}.")
        elif unused:
            problems.append(f"Layer {layer}: experts without a token: {unused}.")
    if len(problems) > _LISTED:
        problems[_LISTED:] = [f"{len(problems) - _LISTED} more layers like these."]
    limited = not np.isnan(history.dropped_L).all()
    run_L, last_L = np.nan_to_num(history.dropped_L), np.nan_to_num(history.last.dropped_L())
    if run_L.any():
        worst = int(last_L.argmax())
        problems.insert(
            0,
            f"Dropped choices: {run_L.mean():.1%} over the run, {last_L.mean():.1%} in the last line "
            f"(layer {layers[worst]}: {last_L[worst]:.1%}).",
        )
    if problems:
        return f'<ul class="bad">{"".join(f"<li>{escape(problem)}</li>" for problem in problems)}</ul>'
    none = ", and no choice was dropped in the run" if limited else ""
    return f'<p class="good">In the last line every expert had tokens{none}.</p>'


def draw_maps(
    maps: Mapping[str, NDArray[np.float64]],
    *,
    columns: int = 1,
    rows: Sequence[str] | None = None,
    ends: Sequence[int] | None = None,
) -> Figure:
    """Heat maps of loads over their layer's mean, by title.

    Args:
        maps: [L, E]; or [E, N], with `ends`.
        columns: maps beside each other.
        rows: names of the rows; default: numbers of experts.
        ends: the last batch of each point in time.
    """
    lines = -(-len(maps) // columns)
    height = max(1.9, 0.24 * min(len(rows or ()), _LABELS) + 1.0)
    figure = Figure(figsize=(12.8, height * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for place in axes.flat[len(maps) :]:
        place.set_axis_off()
    for (title, relative), place in zip(maps.items(), axes.flat, strict=False):
        image = place.imshow(relative, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
        place.set_title(title, fontsize=9)
        place.tick_params(labelsize=7)
        if rows is not None:
            step = -(-len(rows) // _LABELS)
            place.set_yticks(range(0, len(rows), step), rows[::step])
        if ends is None:
            place.set_xlabel("expert", fontsize=8)
        else:
            ticks = np.unique([0, len(ends) // 2, len(ends) - 1])
            place.set_xticks(ticks, [str(ends[tick]) for tick in ticks])
            place.set_ylabel("expert", fontsize=8)
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.8, ticks=[0, 1, 2])
    bar.ax.set_yticklabels(["0", "1: even", "2 and more"], fontsize=8)
    return figure


def to_svg(figure: Figure) -> str:
    """An `<svg>` element for an HTML page. It refers to nothing outside itself; text from a run is escaped."""
    out = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # no links to vocabularies
    with rc_context({"text.parse_math": False, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata=metadata)
    text = out.getvalue()
    return text[text.index("<svg") :]
