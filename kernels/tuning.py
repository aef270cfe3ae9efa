"""Which tile a product runs with: by shape class from a committed table. Depends on shapes alone, never on data.

The rows of a shape are those of the operands, or those of a pretended load while kernels are compiled ahead.

Shapes: R rows, E experts, N columns and K inner width of a product.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("hopper.json")
HEIGHT = 64  # rows of a consumer
MOST_ROWS = 2**17  # rows of one expert in the loads that are compiled ahead
_pretended: list[tuple[int, int]] = []  # rows of an expert, rows in all; the last one counts


class Tile(NamedTuple):
    """A configuration of a Hopper kernel: `group` tiles share an operand in L2, `split` parts leave the epilogue.

    bm: 128 or 192.
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 3
    group: int = 8
    split: int = 2


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def shape_class(product: str, *, rows_per_expert: int, n: int, k: int) -> str:
    """The key of the committed table: logarithms of the sizes in half steps (512 is 9, 768 is 9.5)."""
    return f"{product} {_half(rows_per_expert):g} {_half(n):g} {_half(k):g}"


def _half(value: int) -> float:
    return round(2 * math.log2(max(value, 1))) / 2


@functools.lru_cache(maxsize=4096)
def tile_of(product: str, rows_per_expert: int, n: int, k: int) -> Tile:
    """The tile of this shape class, or of the product's nearest one in the committed table.

    Near is the sum of the distances of the logarithms. For four models that the table lacks, tiles timed on their own
    operands gave layers 0.975 to 1.001 times as fast (H200).
    """
    return _nearest(shape_class(product, rows_per_expert=rows_per_expert, n=n, k=k))


@functools.cache  # with expert parallelism the number of rows is new at every launch, its class is not
def _nearest(wanted: str) -> Tile:
    sizes = _sizes(wanted)

    def distance(key: str) -> float:
        return sum(abs(a - b) for a, b in zip(_sizes(key), sizes, strict=True))

    keys = [key for key in _table() if key.split()[0] == wanted.split()[0]]
    return Tile(**_table()[min(keys, key=distance)]) if keys else Tile()


def _sizes(key: str) -> list[float]:
    return [float(size) for size in key.split()[1:]]


@contextmanager
def pretend(rows_per_expert: int, experts: int) -> Iterator[None]:
    """Selects tiles for a hypothetical load: `experts` experts with `rows_per_expert` rows each.

    Code that compiles kernels for all loads runs few rows and names here the load that they represent.
    """
    _pretended.append((rows_per_expert, rows_per_expert * experts))
    try:
        yield
    finally:
        _pretended.pop()


def is_pretended() -> bool:
    return bool(_pretended)


def per_expert(rows: int, experts: int) -> int:
    """Rows of an expert on average."""
    return _pretended[-1][0] if _pretended else rows // (experts or 1)


def all_rows(rows: int) -> int:
    """Rows of all experts."""
    return _pretended[-1][1] if _pretended else rows


def all_experts(experts: int) -> int:
    """The number of experts."""
    return _pretended[-1][1] // _pretended[-1][0] if _pretended else experts


def all_loads() -> list[int]:
    """Rows per expert that represent every class of load: half steps of log2, as in `shape_class`."""
    loads = dict.fromkeys(round(2 ** (half / 2)) for half in range(2 * (MOST_ROWS.bit_length() - 1) + 1))
    return list(loads)
