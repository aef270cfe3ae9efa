"""Reads the JSON lines of `callbacks.expert_load.file` as a bounded number of points in time.

The file is not trusted: a bad line is an error in one sentence.
Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foundry_moe.schema import UserError

POINTS = 120  # columns of a heat map over time, at most
MOST_LINE_BYTES = 32 * 2**20
_MOST_COUNT = 2**50  # sums of a thousand such counts are exact in fp64
_MOST_CELLS = 2**20  # counts on the page, of 5 bytes each; many layers and experts give fewer points
_LOSS = "loss/train/total"


class LoadPoint(NamedTuple):
    """Lines of the file, merged. end: the last batch. loads_LE: their sum. loss: the last one, or NaN. top_k: K."""

    end: int
    loads_LE: NDArray[np.float64]
    loss: float
    top_k: int

    def merged(self, later: LoadPoint) -> LoadPoint:
        return later._replace(loads_LE=self.loads_LE + later.loads_LE)


@dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """Each point merges `lines_a_point` of `lines` lines; the last point may merge fewer. last_LE: of the last line."""

    layers: tuple[int, ...]
    lines: int
    lines_a_point: int
    points: list[LoadPoint]
    last_LE: NDArray[np.float64]

    @property
    def ends(self) -> list[int]:
        return [point.end for point in self.points]

    @property
    def loads_NLE(self) -> NDArray[np.float64]:
        return np.stack([point.loads_LE for point in self.points])


def over_mean(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads [..., E] over their mean: 1 = even. 0 for a layer without tokens."""
    return loads / np.maximum(loads.mean(-1, keepdims=True), 1e-9)


def entropy_of(loads_E: NDArray[np.float64]) -> float:
    """Entropy of a layer's loads over log E: 1 = even, 0 = one expert. 1 for one expert, or without a token."""
    if len(loads_E) < 2 or not loads_E.any():
        return 1.0
    shares = loads_E[loads_E > 0] / loads_E.sum()
    return float(abs((shares * np.log(shares)).sum()) / np.log(len(loads_E)))


def collapse_entropy(experts: int, top_k: int) -> float:
    """The entropy of loads over log E below which a layer collapses: that of sqrt(K E) experts with all tokens.

    Half way from even loads to those of K experts, fewer than which no token has; 0 where K is E.
    """
    return 0.5 + 0.5 * math.log(top_k) / math.log(experts) if top_k < experts else 0.0


def read_history(path: Path) -> LoadHistory:
    """The history of a file of loads. An incomplete last line is ignored: the run is writing it, or was killed.

    Raises:
        ValueError: the file cannot be read, has no line, or has a bad line, whose number is named.
    """
    points: list[LoadPoint] = []
    layers: tuple[int, ...] = ()
    last_LE = np.zeros((0, 0))
    number, each, most = 0, 1, POINTS
    try:
        with path.open("rb") as file:
            for raw in iter(lambda: file.readline(MOST_LINE_BYTES), b""):
                if raw.startswith(b"{") and not raw.endswith(b"\n") and len(raw) < MOST_LINE_BYTES:
                    break
                number += 1
                line, found = _parse(raw, f"{path} line {number}")
                if points and (found != layers or line.loads_LE.shape != last_LE.shape or line.end <= points[-1].end):
                    raise UserError(f"{path} line {number}: it is of another run than the line before")
                layers, last_LE = found, line.loads_LE
                most = max(8, min(POINTS, _MOST_CELLS // last_LE.size)) // 2 * 2
                if points and (number - 1) % each:
                    points[-1] = points[-1].merged(line)
                elif len(points) < most:
                    points.append(line)
                else:
                    points = [*map(LoadPoint.merged, points[::2], points[1::2]), line]
                    each *= 2
    except OSError as error:
        raise UserError(
            f"{str(path)[-200:]} cannot be read: {error.strerror}; give the file of callbacks.expert_load.file"
        ) from error
    if not points:
        raise UserError(f"{path} has no line yet: the run writes one each callbacks.expert_load.interval")
    return LoadHistory(layers=layers, lines=number, lines_a_point=each, points=points, last_LE=last_LE)


def _parse(raw: bytes, where: str) -> tuple[LoadPoint, tuple[int, ...]]:
    """A line and its layers."""
    try:
        value = json.loads(raw)
        loads_LE = np.array(list(value["loads"].values()), dtype=np.float64)
        loss = value.get("metrics", {}).get(_LOSS)
        top_k = operator.index(value.get("top_k", 1))  # files of earlier versions have none
        point = LoadPoint(operator.index(value["batch"]), loads_LE, np.nan if loss is None else float(loss), top_k)
        layers = tuple(map(int, value["loads"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{where} is not one that callbacks.expert_load writes") from error
    valid = loads_LE.ndim == 2 and loads_LE.size and bool(((loads_LE >= 0) & (loads_LE <= _MOST_COUNT)).all())
    if not valid or point.end < 0 or len(set(layers)) < len(layers) or top_k < 1:
        raise UserError(f"{where} is not one that callbacks.expert_load writes")
    return point, layers
