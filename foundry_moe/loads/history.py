"""Reads the JSON lines of `callbacks.expert_load.file` as a bounded number of points in time.

The file is not trusted: a bad line is an error in one sentence. Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from foundry_moe.schema import UserError

POINTS = 120  # columns of a heat map over time
EVEN_ENOUGH = 0.5  # entropy of a layer's loads over log E; below it, sqrt(E) experts process all tokens
MOST_LINE_BYTES = 32 * 2**20
_MOST_CELLS = 2**20  # counts on the page, of 5 bytes each; many layers and experts give fewer points
_LOSS = "loss/train/total"
_MOST_COUNT = 2**50  # sums of a thousand such counts are exact in fp64
_FORM = 'this is not {"batch": 1, "loads": {"0": [2, 3]}, "metrics": {"x": 0.5}}, with as many counts in each layer'


@dataclass(frozen=True, kw_only=True)
class LoadLine:
    """One line. loads_LE: choices per expert up to `batch`. metrics: the finite ones."""

    batch: int
    layers: tuple[int, ...]
    loads_LE: NDArray[np.float64]
    metrics: dict[str, float]

    def dropped_L(self) -> NDArray[np.float64]:
        """Shares of dropped choices; NaN for layers without a capacity."""
        return np.array([self.metrics.get(f"dmoe/layer{layer}/dropped", np.nan) for layer in self.layers])


@dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """Each point merges `lines_a_point` lines; the last point may merge fewer.

    lines: number of lines in the file.
    ends: the last batch of each point.
    loads_NLE: choices per expert, summed over the lines of a point.
    dropped_L: shares of dropped choices, means over all lines; NaN for layers without a capacity.
    loss_N: the training loss of the last line of each point; NaN if the file has none.
    last: the last line.
    """

    lines: int
    lines_a_point: int
    ends: list[int]
    loads_NLE: NDArray[np.float64]
    dropped_L: NDArray[np.float64]
    loss_N: NDArray[np.float64]
    last: LoadLine


def over_mean(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads [..., E] over their mean: 1 = even. 0 for a layer without tokens."""
    return loads / np.maximum(loads.mean(-1, keepdims=True), 1e-9)


def entropy_of(loads_E: NDArray[np.float64]) -> float:
    """Entropy of a layer's loads over log E: 1 = even, 0 = one expert. 1 for one expert, or without a token."""
    if len(loads_E) < 2 or not loads_E.any():
        return 1.0
    shares = loads_E[loads_E > 0] / loads_E.sum()
    return float(abs((shares * np.log(shares)).sum()) / np.log(len(loads_E)))


def read_history(path: Path) -> LoadHistory:
    """The history of a file of loads. An incomplete last line is ignored: the run is writing it, or was killed.

    Raises:
        ValueError: the file cannot be read, has no line, or has a bad line, whose number is named.
    """
    try:
        with path.open("rb") as file:
            number = sum(1 for _ in _raw_lines(file))
            file.seek(0)
            return _merge(path, number, _parsed_lines(path, file))
    except OSError as error:
        raise UserError(
            f"{str(path)[-200:]} cannot be read: {error.strerror}; give the file of callbacks.expert_load.file"
        ) from error


def _merge(path: Path, number: int, lines: Iterator[LoadLine]) -> LoadHistory:
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path} has no line yet: the run writes one each callbacks.expert_load.interval")
    lines_a_point = -(-number // max(8, min(POINTS, _MOST_CELLS // first.loads_LE.size)))
    ends, loads, dropped, losses = [], [], [], []
    point = [first, *islice(lines, lines_a_point - 1)]
    while point:
        last = point[-1]
        ends.append(last.batch)
        losses.append(last.metrics.get(_LOSS, np.nan))
        loads.append(np.sum([line.loads_LE for line in point], axis=0))
        dropped += [line.dropped_L() for line in point]
        point = list(islice(lines, lines_a_point))
    return LoadHistory(
        lines=len(dropped),
        lines_a_point=lines_a_point,
        ends=ends,
        loads_NLE=np.stack(loads),
        dropped_L=np.mean(dropped, axis=0),
        loss_N=np.array(losses),
        last=last,
    )


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(MOST_LINE_BYTES), b"")


def _parsed_lines(path: Path, file: BinaryIO) -> Iterator[LoadLine]:
    before: LoadLine | None = None
    for number, raw in enumerate(_raw_lines(file), 1):
        if raw.startswith(b"{") and not raw.endswith(b"\n") and len(raw) < MOST_LINE_BYTES:
            return
        try:
            line = _parse_line(raw)
            if before is not None and line.batch <= before.batch:
                raise UserError(f"batch {line.batch} comes after batch {before.batch}")
            if before is not None and (line.layers, line.loads_LE.shape) != (before.layers, before.loads_LE.shape):
                raise UserError("its layers or experts differ from those of the line before: it is of another model")
        except UserError as error:
            raise UserError(f"{path} line {number}: {error}") from error
        yield line
        before = line


def _parse_line(raw: bytes) -> LoadLine:
    try:
        value = json.loads(raw)
        loads, metrics = value["loads"], value.get("metrics", {}).items()
        line = LoadLine(
            batch=operator.index(value["batch"]),
            layers=tuple(map(int, loads)),
            loads_LE=np.array(list(loads.values()), dtype=np.float64),
            metrics={name: float(number) for name, number in metrics if number is not None},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(_FORM) from error
    counts_LE = line.loads_LE
    valid = counts_LE.ndim == 2 and counts_LE.size and bool(((counts_LE >= 0) & (counts_LE <= _MOST_COUNT)).all())
    if not valid or line.batch < 0 or len(set(line.layers)) < len(line.layers):
        raise UserError(_FORM)
    return line
