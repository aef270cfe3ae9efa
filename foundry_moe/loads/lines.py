"""Reads the JSON lines of `callbacks.expert_load.file`. The file is not trusted: every value is checked.

Shapes: L layers, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

MOST_LINE_BYTES = 32 * 2**20
MOST_LAYERS, MOST_EXPERTS = 4096, 65_536
MOST_CELLS = 2**20  # layers times experts
MOST_COUNT = 2**50  # sums of a thousand of them are exact in fp64
MOST_METRICS = 100_000
MOST_METRIC = 1e30
_NAME_LENGTH = 200
EVEN_ENOUGH = 0.5  # entropy of a layer's loads over log E: below, sqrt(E) experts do the work of all


@dataclass(frozen=True, kw_only=True)
class LoadLine:
    """One line.

    batch: up to which the loads were counted.
    layers: the layers' indices.
    loads_LE: choices per expert, fp64.
    metrics: what was logged with them and is finite.
    """

    batch: int
    layers: tuple[int, ...]
    loads_LE: NDArray[np.float64]
    metrics: dict[str, float]


def count_lines(path: Path) -> int:
    """How many whole lines the file has.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read: {error.strerror}; name the file of callbacks.expert_load.file")


def read_lines(path: Path) -> Iterator[LoadLine]:
    """The lines of a file, in order. An incomplete last line is left out: the run is writing it, or was killed.

    Raises:
        ValueError: a bad line, in one sentence with its number; or the file cannot be read.
    """
    before: LoadLine | None = None
    try:
        with path.open("rb") as file:
            for number in range(1, 2**63):
                raw = file.readline(MOST_LINE_BYTES + 1)
                if len(raw) > MOST_LINE_BYTES:
                    raise ValueError(f"{path} line {number} is longer than {MOST_LINE_BYTES} bytes: no file of loads")
                if not raw or (raw.startswith(b"{") and not raw.endswith(b"\n")):
                    return
                try:
                    line = parse_line(raw)
                    _check_order(line, before)
                except _BadLineError as error:
                    raise ValueError(f"{path} line {number}: {error}") from error
                yield line
                before = line
    except OSError as error:
        raise _unreadable(path, error) from error


class _BadLineError(Exception):
    pass


def parse_line(raw: bytes) -> LoadLine:
    """One line, without its place in the file. Raises `_BadLineError`."""
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _BadLineError("this is not JSON") from error
    if not isinstance(value, dict) or not {"batch", "loads"} <= set(value):
        raise _BadLineError('this is not {"batch": ..., "loads": {...}, "metrics": {...}}')
    batch = value["batch"]
    if not _is_count(batch):
        raise _BadLineError(f"batch ({_short(batch)}) must be a whole number of 0 or more")
    layers, loads_LE = _parse_loads(value["loads"])
    return LoadLine(batch=batch, layers=layers, loads_LE=loads_LE, metrics=_parse_metrics(value.get("metrics", {})))


def _parse_loads(loads: Any) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    if not isinstance(loads, dict) or not 1 <= len(loads) <= MOST_LAYERS:
        raise _BadLineError(f"loads must be a mapping of 1 to {MOST_LAYERS} layers, not {_short(loads)}")
    width = None
    for name, counts in loads.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 6):
            raise _BadLineError(f"loads ({_short(name)}) must name a layer by its index")
        if not isinstance(counts, list) or not 1 <= len(counts) <= MOST_EXPERTS:
            raise _BadLineError(f"loads.{name} must be a list of 1 to {MOST_EXPERTS} counts")
        if width is not None and len(counts) != width:
            raise _BadLineError(f"loads.{name} has {len(counts)} experts where another layer has {width}")
        width = len(counts)
        for count in counts:
            if not _is_count(count):
                raise _BadLineError(f"loads.{name} has {_short(count)} where a count of 0 to 2^50 belongs")
    if len(loads) * (width or 0) > MOST_CELLS:
        raise _BadLineError(f"{len(loads)} layers of {width} experts are more than {MOST_CELLS} counts")
    layers = tuple(int(name) for name in loads)
    if len(set(layers)) < len(layers):
        raise _BadLineError("loads names a layer twice")
    return layers, np.array(list(loads.values()), dtype=np.float64)


def _parse_metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, dict) or len(metrics) > MOST_METRICS:
        raise _BadLineError(f"metrics must be a mapping of names to numbers, not {_short(metrics)}")
    found = {}
    for name, number in metrics.items():
        if len(name) > _NAME_LENGTH:
            raise _BadLineError(f"metrics has a name of {len(name)} characters ({_short(name)})")
        if number is None:
            continue  # not finite when it was logged
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _BadLineError(f"metrics ({_short(name)}) must be a number or null, not {_short(number)}")
        try:
            found[name] = float(number)
        except OverflowError as error:
            raise _BadLineError(f"metrics ({_short(name)}) is too large a number") from error
        if not abs(found[name]) < MOST_METRIC:
            raise _BadLineError(f"metrics ({_short(name)}) is too large a number")
    return found


def _check_order(line: LoadLine, before: LoadLine | None) -> None:
    if before is None:
        return
    if line.batch <= before.batch:
        raise _BadLineError(f"batch {line.batch} comes after batch {before.batch}")
    if line.layers != before.layers or line.loads_LE.shape != before.loads_LE.shape:
        raise _BadLineError("its layers or experts are others than those of the line before: this is another model's")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are not JSON
