"""Draws the load of experts as a picture, over a whole run and as it developed.

Shapes: L layers, E experts, N points in time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

_WRITE_VALUES_UP_TO = 16  # experts; beyond that the numbers do not fit their cells
_LEGEND_UP_TO = 12  # layers
POINTS = 256


class BalanceHistory:
    """The largest load over the mean load of each layer, by batch.

    Holds POINTS points at most, in tensors of one size, so that a checkpoint's plan stays as it is: when they are full,
    every second one is dropped, and older parts of a long run have fewer points than newer ones.
    """

    def __init__(self, layers: int) -> None:
        self.batches_N = torch.full((POINTS,), -1, dtype=torch.int64)
        self.worst_NL = torch.zeros(POINTS, layers)

    def add(self, batch: int, counts_LE: Tensor) -> None:
        """Notes the loads up to this batch."""
        free = (self.batches_N < 0).nonzero()
        if not len(free):
            kept = POINTS // 2
            for tensor, empty in ((self.batches_N, -1), (self.worst_NL, 0)):
                tensor[:kept] = tensor[0::2].clone()
                tensor[kept:] = empty
            free = (self.batches_N < 0).nonzero()
        loads_LE = counts_LE.float()
        self.batches_N[free[0]] = batch
        self.worst_NL[free[0]] = loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1e-9)

    def points(self) -> tuple[list[int], Tensor]:
        """(batches, worst_NL) of the points there are."""
        used_N = self.batches_N >= 0
        return self.batches_N[used_N].tolist(), self.worst_NL[used_N]


def draw_heatmap(counts_LE: Tensor, names: list[str], path: Path, history: BalanceHistory | None = None) -> None:
    """Writes a PNG: one row a layer, one column an expert, colour = load over the mean load of the layer.

    With a history, a second panel shows over the batches how far each layer's fullest expert was above the mean.
    """
    relative_LE = counts_LE / counts_LE.float().mean(1, keepdim=True).clamp(min=1e-9)
    layers, experts = relative_LE.shape
    width, height = max(6.0, 0.6 * min(experts, 40) + 2), max(2.5, 0.42 * layers + 1.6)
    panels = 1 if history is None else 2
    figure = Figure(figsize=(width, height + 2.6 * (panels - 1)), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, squeeze=False, height_ratios=[height, 2.6][:panels])[:, 0]
    _draw_loads(axes[0], relative_LE, names)
    if history is not None:
        _draw_history(axes[1], history, names)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_loads(axes: Any, relative_LE: Tensor, names: list[str]) -> None:
    layers, experts = relative_LE.shape
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
    axes.figure.colorbar(image, ax=axes, extend="max")


def _draw_history(axes: Any, history: BalanceHistory, names: list[str]) -> None:
    batches, worst_NL = history.points()
    colours = colormaps["viridis"]
    for layer, name in enumerate(names):
        axes.plot(batches, worst_NL[:, layer], label=name, color=colours(layer / max(1, len(names) - 1)), linewidth=1.2)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="batch", title="fullest expert of each layer, over the layer's mean")
    axes.set_ylim(bottom=0.9)
    if len(names) <= _LEGEND_UP_TO:
        axes.legend(fontsize=7, frameon=False, ncols=min(4, len(names)))
