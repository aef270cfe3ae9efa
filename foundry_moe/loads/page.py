"""One HTML file of a run's loads: a verdict, heat maps and charts. It has no script and loads nothing.

Text from the run is escaped.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import numpy as np

from foundry_moe.loads.draw import MAPS_OVER_TIME, draw_lines, draw_loads, draw_over_time, to_svg
from foundry_moe.loads.history import LoadHistory, over_mean, read_history
from foundry_moe.loads.lines import EVEN_ENOUGH

_LISTED = 8  # layers in the verdict
_MOST_LOSSES = 12

# figures of a layer, in the page's order, with the title of their chart
_FIGURES = {
    "max_violation": "MaxVio: fullest expert over the mean, less 1 (0 = even)",
    "entropy": "entropy of loads over log E (1 = even; below 0.5 a layer collapses)",
    "dropped": "dropped choices: share beyond the experts' capacity",
    "router_entropy": "entropy of the router's probabilities over log E (1 = no preference)",
    "dead": "experts without a token since the line before",
    "dead_for": "longest wait: batches that one expert has had no token",
    "rank_max_over_mean": "rows of the fullest rank over the mean (1 = even)",
    "p10": "10th percentile of choices an expert",
    "p90": "90th percentile of choices an expert",
}
_SHARES = [_FIGURES[name] for name in ("entropy", "dropped", "router_entropy")]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #fff; max-width: 1120px; margin: 0 auto;
  padding: 24px; }
h1, h2 { font-size: 20px; margin: 24px 0 4px; }
svg { max-width: 100%; height: auto; }
.bad { color: #b3261e; }
.good { color: #1b7f4b; }
"""


def write_page(source: Path, target: Path) -> int:
    """Reads a file of `callbacks.expert_load.file`, writes the page. Returns the number of lines.

    Raises:
        ValueError: a bad line, or a file without one; the page cannot be written.
    """
    history = read_history(source)
    text = render(history, title=source.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}") from error
    return history.lines


def render(history: LoadHistory, *, title: str) -> str:
    """The page as text."""
    names = [f"layer {layer}" for layer in history.layers]
    last = f"last point, up to batch {history.ends[-1]}"
    overview = draw_loads({"whole run": history.total(), last: over_mean(history.loads_NLE[-1])}, names)
    sections = {"Load of each expert, over its layer's mean": overview}
    some = f" ({MAPS_OVER_TIME} of {len(names)} layers)" if len(names) > MAPS_OVER_TIME else ""
    sections[f"Load of each expert over time{some}"] = draw_over_time(history.relative(), history.ends, names)
    if charts := _charts(history):
        sections["Figures over time, by batch"] = draw_lines(charts, history.ends, _SHARES)
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
    """What is wrong at the last point, a line each; or that nothing is."""
    last = history.metrics[-1]
    problems = []
    for layer in history.layers:
        entropy, dead = last.get(f"dmoe/layer{layer}/entropy"), last.get(f"dmoe/layer{layer}/dead", 0.0)
        if entropy is not None and entropy < EVEN_ENOUGH:
            problems.append(f"Layer {layer} collapses onto few experts: the entropy of its loads is {entropy:.2f}.")
        elif dead > 0:
            problems.append(f"Layer {layer}: experts without a token: {dead:.2g}.")
    if len(problems) > _LISTED:
        problems[_LISTED:] = [f"{len(problems) - _LISTED} more layers like these."]
    limited, dropped = _dropped(history)
    problems = [dropped, *problems] if dropped else problems
    if problems:
        return f'<ul class="bad">{"".join(f"<li>{escape(problem)}</li>" for problem in problems)}</ul>'
    none = " and no choice was dropped in the run" if limited else ""
    return f'<p class="good">At the last point every expert had tokens{none}.</p>'


def _dropped(history: LoadHistory) -> tuple[bool, str]:
    """Whether experts have a capacity, and a sentence where choices were dropped."""
    shares_LN = np.stack([history.series(f"dmoe/layer{layer}/dropped") for layer in history.layers])
    if np.isnan(shares_LN).all():
        return False, ""
    shares_LN = np.nan_to_num(shares_LN)
    if not shares_LN.any():
        return True, ""
    worst = int(shares_LN[:, -1].argmax())
    return True, (
        f"Dropped choices: {shares_LN.mean():.1%} over the run, {shares_LN[:, -1].mean():.1%} at the last point "
        f"(layer {history.layers[worst]}: {shares_LN[worst, -1]:.1%})."
    )


def _charts(history: LoadHistory) -> dict[str, dict[str, np.ndarray]]:
    charts = {
        title: {f"layer {layer}": history.series(f"dmoe/layer{layer}/{figure}") for layer in history.layers}
        for figure, title in _FIGURES.items()
    }
    names = {name for metrics in history.metrics for name in metrics}
    losses = sorted(name for name in names if re.fullmatch(r"dmoe/loss/[\w.-]{1,40}", name))[:_MOST_LOSSES]
    for name in losses:
        loss = name.removeprefix("dmoe/loss/")
        charts[f"loss {loss}: auxiliary, unweighted, mean over layers"] = {loss: history.series(name)}
    known = {
        title: {name: values for name, values in lines.items() if not np.isnan(values).all()}
        for title, lines in charts.items()
    }
    return {title: lines for title, lines in known.items() if lines}
