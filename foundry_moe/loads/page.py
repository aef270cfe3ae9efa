"""One HTML file of a run's loads: heat maps and charts. It opens from the disk, and loads nothing from anywhere.

What comes from the run is escaped, and the page's policy lets no script run but its own.

Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from foundry_moe.loads.charts import Line, draw_chart
from foundry_moe.loads.history import LoadHistory
from foundry_moe.loads.lines import read_lines

_HERE = Path(__file__).parent
_COLLAPSED = 0.5  # entropy of a layer's loads: see callbacks/load_health.py
_MOST_LOSSES = 12
_LARGEST = 999  # hundredths of the mean, in the page's data: 10 times the mean and more look alike

# figures of a layer, in the page's order: title, and what to read in it
_FIGURES = {
    "max_violation": ("MaxVio", "fullest expert over the mean, less 1: 0 = even"),
    "entropy": ("Entropy of loads", "over log E: 1 = even, 0 = one expert has all; below 0.5 a layer collapses"),
    "router_entropy": ("Entropy of the router", "of a token's probabilities, over log E: 1 = no preference"),
    "dead": ("Experts without a token", "since the line before"),
    "dead_for": ("Longest wait", "batches that one expert has had no token"),
    "rank_max_over_mean": ("Fullest rank", "its rows over the mean of the ranks that share experts: 1 = even"),
    "dropped": ("Dropped choices", "share beyond the experts' capacity"),
    "p10": ("10th percentile", "choices an expert"),
    "p90": ("90th percentile", "choices an expert"),
}


def write_page(source: Path, target: Path) -> int:
    """Reads a file of `callbacks.expert_load.file`, writes the page. Returns the number of lines.

    Raises:
        ValueError: a bad line, or a file without one; the page cannot be written.
    """
    history = LoadHistory.of(read_lines(source))
    if not history.lines:
        raise ValueError(f"{source} has no line yet: the run writes one each callbacks.expert_load.interval")
    text = render(history, title=source.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}") from error
    return history.lines


def render(history: LoadHistory, *, title: str) -> str:
    """The page as text."""
    script, style = (_HERE / "page.js").read_text("utf-8"), (_HERE / "page.css").read_text("utf-8")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Expert load: {escape(title)}</title>\n<style>{style}</style></head><body>",
            _header(history, title),
            _SECTIONS,
            f"<section><h2>Over time</h2><div class=charts>{''.join(_charts(history))}</div></section>",
            f'<script type="application/json" id="data">{_data(history)}</script>',
            f"<script>{script}</script></body></html>\n",
        )
    )


_SECTIONS = """
<section><h2>Load of each expert, by layer</h2>
<p>Load over its layer's mean.
<label>When: <input type="range" id="when" min="0" value="0"></label> <output id="span"></output></p>
<canvas id="layers"></canvas><p class="under" id="layers-under">Rest the pointer on a cell.</p></section>
<section><h2>Load over time</h2>
<p><label>Of: <select id="layer"></select></label> <span id="time-says"></span></p>
<canvas id="time"></canvas><p class="under" id="time-under">Rest the pointer on a cell.</p>
<p class="scale">0 <canvas id="scale"></canvas> 2 times the mean and more</p>
<noscript><p>The heat maps need scripts; the charts below do not.</p></noscript></section>
"""


def _header(history: LoadHistory, title: str) -> str:
    experts = history.loads[0].shape[1]
    merged = f"; each point is the sum of {history.lines_a_point} lines" if history.lines_a_point > 1 else ""
    facts = (
        f"Up to batch {history.ends[-1]}: {len(history.layers)} layers of {experts} experts, "
        f"{history.lines} lines{merged}."
    )
    return f"<header><h1>Expert load</h1><p><b>{escape(title)}</b> {escape(facts)}</p>{_verdict(history)}</header>"


def _verdict(history: LoadHistory) -> str:
    """What is wrong at the last point, a line each; or that nothing is."""
    last = history.metrics[-1]
    said = []
    for layer in history.layers:
        entropy, dead = last.get(f"dmoe/layer{layer}/entropy"), last.get(f"dmoe/layer{layer}/dead", 0.0)
        if entropy is not None and entropy < _COLLAPSED:
            said.append(f"Layer {layer} collapses onto few experts: the entropy of its loads is {entropy:.2f}.")
        elif dead >= 1:
            said.append(f"Layer {layer}: experts without a token: {dead:.0f}.")
    shown = said[:8] + ([f"{len(said) - 8} more layers like these."] if len(said) > 8 else [])
    if not shown:
        return '<p class="good">At the last point every expert had tokens.</p>'
    return f'<ul class="bad">{"".join(f"<li>{escape(sentence)}</li>" for sentence in shown)}</ul>'


def _charts(history: LoadHistory) -> list[str]:
    drawn = []
    for figure, (title, explanation) in _FIGURES.items():
        lines = [
            Line(name=f"layer {layer}", values=history.series(f"dmoe/layer{layer}/{figure}"))
            for layer in history.layers
        ]
        lines = [line for line in lines if any(value is not None for value in line.values)]
        if lines:
            axis = (0.0, 1.001) if figure.endswith("entropy") else None
            drawn.append(draw_chart(title, explanation, history.ends, lines, axis))
    names = {name for metrics in history.metrics for name in metrics}
    losses = sorted(name for name in names if re.match(r"dmoe/loss/.", name))[:_MOST_LOSSES]
    for name in losses:
        loss = name.removeprefix("dmoe/loss/")
        line = Line(name=loss, values=history.series(name))
        drawn.append(draw_chart(f"Loss {loss}", "auxiliary, unweighted, mean over layers", history.ends, [line]))
    return drawn


def _data(history: LoadHistory) -> str:
    """Numbers for the heat maps, as hundredths. `<` is written so that no text can end the element."""
    data = {
        "layers": list(history.layers),
        "ends": history.ends,
        "total": _hundredths(history.total()),
        "points": _hundredths(history.relative()),
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _hundredths(relative: np.ndarray) -> Sequence[object]:
    return np.minimum(np.rint(relative * 100), _LARGEST).astype(int).tolist()
