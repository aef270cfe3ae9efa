"""Loads over a run of any length in a bounded number of points.

Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from foundry_moe.loads.lines import LoadLine

POINTS = 120  # columns that a page shows
_MOST_CELLS = 4 * 2**20  # numbers in a page: of many layers and experts there are fewer points


class LoadHistory:
    """Lines, merged two by two whenever there are too many: of a long run each point stands for several.

    ends: the last batch of each point.
    loads: [L, E] of each point, summed over its lines.
    metrics: the means over its lines.
    """

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self.ends: list[int] = []
        self.loads: list[NDArray[np.float64]] = []
        self.metrics: list[dict[str, float]] = []
        self.lines = 0
        self.lines_a_point = 1
        self._open = 0  # lines in the last point
        self._seen: dict[str, int] = {}  # of those, lines that have a metric

    @classmethod
    def of(cls, lines: Iterable[LoadLine]) -> LoadHistory:
        """The history of these lines."""
        history = cls()
        for line in lines:
            history.add(line)
        return history

    def add(self, line: LoadLine) -> None:
        """Takes the next line."""
        self.layers = line.layers
        self.lines += 1
        if self._open in (0, self.lines_a_point):
            if len(self.ends) >= self._most(line.loads_LE.size):
                self._halve()
            self.ends.append(line.batch)
            self.loads.append(line.loads_LE.copy())
            self.metrics.append(dict(line.metrics))
            self._open, self._seen = 1, dict.fromkeys(line.metrics, 1)
            return
        self.ends[-1] = line.batch
        self.loads[-1] += line.loads_LE
        means = self.metrics[-1]
        for name, value in line.metrics.items():
            seen = self._seen[name] = self._seen.get(name, 0) + 1
            means[name] = means.get(name, 0.0) + (value - means.get(name, 0.0)) / seen
        self._open += 1

    def _most(self, cells: int) -> int:
        return max(8, min(POINTS, _MOST_CELLS // cells)) // 2 * 2

    def _halve(self) -> None:
        pairs = range(0, len(self.ends), 2)
        self.ends = self.ends[1::2]
        self.loads = [self.loads[i] + self.loads[i + 1] for i in pairs]
        self.metrics = [_mean(self.metrics[i], self.metrics[i + 1]) for i in pairs]
        self.lines_a_point *= 2

    def relative(self) -> NDArray[np.float64]:
        """[N, L, E]: loads over their layer's mean at that point; 1 = even, and 0 where a layer had no token."""
        loads_NLE = np.stack(self.loads)
        return loads_NLE / np.maximum(loads_NLE.mean(-1, keepdims=True), 1e-9)

    def total(self) -> NDArray[np.float64]:
        """[L, E]: as `relative`, over the whole run."""
        loads_LE = np.sum(self.loads, axis=0)
        return loads_LE / np.maximum(loads_LE.mean(-1, keepdims=True), 1e-9)

    def series(self, name: str) -> list[float | None]:
        """A metric at each point; None where it was not logged."""
        return [metrics.get(name) for metrics in self.metrics]


def _mean(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    both = {name: (value + other[name]) / 2 if name in other else value for name, value in one.items()}
    return {**other, **both}
