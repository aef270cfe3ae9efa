"""The loads of a run of any length as a bounded number of points.

Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundry_moe.loads.lines import LoadLine, count_lines, read_lines

POINTS = 120  # columns of a heat map over time
_MOST_CELLS = 4 * 2**20  # counts in memory: with many layers and experts there are fewer points


@dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """Each point stands for `lines_a_point` lines in a row; the last for as many as are left.

    layers: the layers' indices.
    lines: how many were read.
    ends: the last batch of each point.
    loads_NLE: choices per expert, summed over the lines of a point.
    metrics: of each point, the mean over those of its lines that have the metric.
    """

    layers: tuple[int, ...]
    lines: int
    lines_a_point: int
    ends: list[int]
    loads_NLE: NDArray[np.float64]
    metrics: list[dict[str, float]]

    def relative(self) -> NDArray[np.float64]:
        """[N, L, E]: loads over their layer's mean at that point; 1 = even, and 0 where a layer had no token."""
        return over_mean(self.loads_NLE)

    def total(self) -> NDArray[np.float64]:
        """[L, E]: as `relative`, over the whole run."""
        return over_mean(self.loads_NLE.sum(0))

    def series(self, name: str) -> NDArray[np.float64]:
        """[N]: a metric at each point; NaN where it was not logged."""
        return np.array([metrics.get(name, np.nan) for metrics in self.metrics])


def over_mean(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads [..., E] over their mean."""
    return loads / np.maximum(loads.mean(-1, keepdims=True), 1e-9)


def read_history(path: Path) -> LoadHistory:
    """The history of a file of loads.

    Raises:
        ValueError: see `read_lines`; or the file has no line.
    """
    number = max(1, count_lines(path))
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path} has no line yet: the run writes one each callbacks.expert_load.interval")
    lines_a_point = -(-number // max(8, min(POINTS, _MOST_CELLS // first.loads_LE.size)))
    ends, loads, metrics, read = [], [], [], 0
    point = [first, *islice(lines, lines_a_point - 1)]
    while point:
        read += len(point)
        ends.append(point[-1].batch)
        loads.append(np.sum([line.loads_LE for line in point], axis=0))
        metrics.append(_means(point))
        point = list(islice(lines, lines_a_point))
    return LoadHistory(
        layers=first.layers,
        lines=read,
        lines_a_point=lines_a_point,
        ends=ends,
        loads_NLE=np.stack(loads),
        metrics=metrics,
    )


def _means(lines: list[LoadLine]) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line.metrics)
    return {name: float(np.mean([line.metrics[name] for line in lines if name in line.metrics])) for name in names}
