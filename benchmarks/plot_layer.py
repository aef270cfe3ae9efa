"""Draws the README's chart from the CSV files of its table: `python benchmarks/plot_layer.py`."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "images" / "layer_time.svg"
CASES = ("Mixtral", "DBRX", "OLMoE", "Qwen3")
WAYS = {
    "ours": ("foundry_moe, 2026-11-27", "#1b6ca8"),
    "torch grouped": ("sort, torch._grouped_mm, scatter, 2026-11-22", "#b9c3cc"),
}


def read_times() -> dict[tuple[str, str], float]:
    """(case, way) -> time of the layer over the dense roof, uniform load, one H200."""
    grouped = [row for row in rows_of("layer") if row["load"] == "uniform"]
    ours = [row for row in rows_of("layer_2026_11_27") if (row["chip"], row["kernels"]) == ("H200", "Hopper")]
    times = {(row["case"], row[""]): float(row["over the dense roof"]) for row in grouped}
    return times | {(row["case"], "ours"): float(row["over the dense roof"]) for row in ours}


def rows_of(name: str) -> list[dict[str, str]]:
    with (HERE / "figures" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw() -> Figure:
    """Grouped bars, one pair per case, with the dense FFN of the same active arithmetic as a line at 1."""
    times = read_times()
    figure = Figure(figsize=(7.2, 2.9))
    axes = figure.add_subplot()
    for number, (way, (label, colour)) in enumerate(WAYS.items()):
        places = [place + 0.38 * (number - 0.5) for place in range(len(CASES))]
        bars = axes.bar(places, [times[case, way] for case in CASES], width=0.36, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    axes.axhline(1, color="black", linewidth=0.9, linestyle="--", label="dense FFN, same active arithmetic")
    axes.set_xticks(range(len(CASES)), CASES)
    axes.set(ylabel="time over dense", title="MoE layer, forward and backward, one H200, bf16 (lower is better)")
    axes.title.set_fontsize(10)
    axes.set_ylim(0, 3.2)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "layer", "svg.fonttype": "none", "font.family": "sans-serif"})
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
