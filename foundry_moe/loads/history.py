"""Reads the JSON lines of `callbacks.expert_load.file` as a bounded number of points in time.

The file is not trusted: a bad line is an error in one sentence. Shapes: N points in time, L layers, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

POINTS = 120  # columns of a heat map over time
EVEN_ENOUGH = 0.5  # entropy of a layer's loads over log E; below it, sqrt(E) experts process all tokens
MOST_LINE_BYTES = 32 * 2**20
_MOST_CELLS = 4 * 2**20  # counts in memory; many layers and experts give fewer points
_MOST_COUNT = 2**50  # sums of a thousand such counts are exact in fp64
_MOST_METRIC = 1e30


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
    last: the last line.
    """

    lines: int
    lines_a_point: int
    ends: list[int]
    loads_NLE: NDArray[np.float64]
    dropped_L: NDArray[np.float64]
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
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; give the file of callbacks.expert_load.file"
        ) from error


def _merge(path: Path, number: int, lines: Iterator[LoadLine]) -> LoadHistory:
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path} has no line yet: the run writes one each callbacks.expert_load.interval")
    lines_a_point = -(-number // max(8, min(POINTS, _MOST_CELLS // first.loads_LE.size)))
    ends, loads, dropped = [], [], []
    point = [first, *islice(lines, lines_a_point - 1)]
    while point:
        last = point[-1]
        ends.append(last.batch)
        loads.append(np.sum([line.loads_LE for line in point], axis=0))
        dropped += [line.dropped_L() for line in point]
        point = list(islice(lines, lines_a_point))
    return LoadHistory(
        lines=len(dropped),
        lines_a_point=lines_a_point,
        ends=ends,
        loads_NLE=np.stack(loads),
        dropped_L=np.mean(dropped, axis=0),
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
                raise ValueError(f"batch {line.batch} comes after batch {before.batch}")
            if before is not None and (line.layers, line.loads_LE.shape) != (before.layers, before.loads_LE.shape):
                raise ValueError("its layers or experts differ from those of the line before: it is of another model")
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
        yield line
        before = line


def _parse_line(raw: bytes) -> LoadLine:
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError("this is not JSON") from error
    if not isinstance(value, dict) or not {"batch", "loads"} <= set(value):
        raise ValueError('this is not {"batch": ..., "loads": {...}, "metrics": {...}}')
    batch, loads, metrics = value["batch"], value["loads"], value.get("metrics", {})
    if not _is_count(batch):
        raise ValueError("batch must be a whole number of 0 or more")
    layers = [int(name) for name in loads if name.isdecimal() and len(name) < 7] if isinstance(loads, dict) else []
    if not layers or len(set(layers)) < len(loads):
        raise ValueError("loads must be a mapping of layer indices to lists of counts")
    rows = list(loads.values())
    if not all(isinstance(row, list) and 0 < len(row) == len(rows[0]) and all(map(_is_count, row)) for row in rows):
        raise ValueError("loads must have a list of as many counts, 0 to 2^50, for each layer")
    if not isinstance(metrics, dict) or not all(number is None or _is_metric(number) for number in metrics.values()):
        raise ValueError("metrics must be a mapping of names to finite numbers or null")
    return LoadLine(
        batch=batch,
        layers=tuple(layers),
        loads_LE=np.array(rows, dtype=np.float64),
        metrics={name: float(number) for name, number in metrics.items() if number is not None},
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNT


def _is_metric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST_METRIC


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are not JSON
