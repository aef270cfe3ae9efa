"""Draws the charts of docs/explanation/recipe.md from figures/recipes*.csv: `python -m benchmarks.plot_recipes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib

from benchmarks.papers.dropping import GATES, plot, read_rows

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
NAMES = {  # of runs, as the page has them
    "dense": "dense",
    "dmoe": "64 experts of 2048, top-1",
    "fine": "64 experts of 256, top-8",
    "fine,experts=256": "256 experts of 256, top-8",
    "fine,shared_width=0.5,top_k=7": "64 of 256, top-7, shared 256",
    "fine,experts=128,shared_width=2.0,top_k=4": "128 of 256, top-4, shared 1024",
    "fine,experts=128,shared_width=0.5,top_k=7": "128 experts",
    "fine,gate_lr=0.1": "gate's learning rate times 0.1",
    "fine,gate.score=sigmoid": "sigmoid scores",
    "fine,loss.z=0.001": "loss z: 0.001",
}


def draw(folder: Path) -> None:
    """Writes recipes_sizes.svg and recipes_gates.svg."""
    rows = read_rows(HERE / "figures" / "recipes_sizes.csv")
    rows = [replace(row, size="XS, Small, Medium", way=f"{row.size}, {NAMES[row.way]}") for row in rows]
    gates = read_rows(HERE / "figures" / "recipes.csv")
    first = {row.run for row in gates}  # the changes have some of these runs again
    gates += [row for row in read_rows(HERE / "figures" / "recipes_changes.csv") if row.run not in first]
    gates = [replace(row, way=NAMES[row.way]) for row in gates if row.top_share and not row.seed and row.way in NAMES]
    with matplotlib.rc_context({"svg.hashsalt": "recipes", "svg.fonttype": "none", "font.family": "sans-serif"}):
        plot(rows, folder / "recipes_sizes.svg")
        plot(gates, folder / "recipes_gates.svg", GATES)


if __name__ == "__main__":
    draw(IMAGES)
