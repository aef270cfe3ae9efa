"""Draws the load of experts as a picture. Shapes: L layers, E experts."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

_WRITE_VALUES_UP_TO = 16  # experts; beyond that the numbers do not fit their cells


def draw_heatmap(counts_LE: Tensor, names: list[str], path: Path) -> None:
    """Writes a PNG: one row a layer, one column an expert, colour = load over the mean load of the layer."""
    relative_LE = counts_LE / counts_LE.float().mean(1, keepdim=True).clamp(min=1e-9)
    layers, experts = relative_LE.shape
    figure = Figure(figsize=(max(6.0, 0.6 * min(experts, 40) + 2), max(2.5, 0.42 * layers + 1.6)), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(relative_LE.numpy(), aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
    axes.set(xlabel="expert", title="load of each expert, over its layer's mean (1 = even)")
    axes.set_yticks(range(layers), names)
    if experts <= _WRITE_VALUES_UP_TO:
        axes.set_xticks(range(experts))
        for row in range(layers):
            for column in range(experts):
                value = relative_LE[row, column].item()
                shade = "white" if abs(value - 1) > 0.7 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    figure.colorbar(image, ax=axes, extend="max")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
