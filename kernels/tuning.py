"""Which tile a product runs with: by shape class from a committed table. Depends on shapes alone, never on data.

The rows of a shape are those of the operands, or those of a pretended load while kernels are compiled ahead.

Shapes: R rows, E experts, N columns and K inner width of a product.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("hopper.json")
HEIGHT = 64  # rows of a consumer of a specialised tile
MOST_ROWS = 2**17  # rows of one expert in the loads that are compiled ahead
_pretended: list[tuple[int, int]] = []  # rows of an expert, rows in all; the last one counts


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A configuration of a Hopper kernel: `group` tiles share an operand in L2, `split` parts leave the epilogue.

    `specialised` tiles run in `hopper_products`, where `warps`, `flatten` and `per_sm` are not used. They have 128 or
    192 rows.
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 3
    warps: int = 8
    group: int = 8
    split: int = 2
    flatten: int = 1
    per_sm: int = 1
    specialised: int = 0


_VALID = {
    "bm": (16, 32, 64, 128, 192, 256),
    "bn": (16, 32, 64, 128, 256),
    "bk": (16, 32, 64, 128),
    "stages": range(1, 9),
    "warps": (1, 2, 4, 8, 16),
    "group": range(1, 65),
    "split": (1, 2, 4, 8),
    "per_sm": range(1, 9),
    **dict.fromkeys(("flatten", "specialised"), (0, 1)),
}


def check_entry(key: str, tile: Tile) -> None:
    """Checks an entry of a file of tuned tiles, which others may have written.

    Raises:
        ValueError: the key is not a shape class, or the tile is none that a kernel has.
    """
    if not re.fullmatch(r"\w+( \d{1,2}(\.5)?){3}", key):
        raise ValueError(f"{key[:60]!r} is not a shape class such as 'down 9 11 10.5'")
    for name, value in dataclasses.asdict(tile).items():
        if type(value) is not int or value not in _VALID[name]:
            raise ValueError(f"{name} of {key!r} ({str(value)[:60]}) must be among {', '.join(map(str, _VALID[name]))}")


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


@functools.cache
def is_committed(key: str) -> bool:
    """Whether the committed table has this matrix, with any number of rows an expert.

    The gate may cause another load in any step, and a step must not time anything.
    """
    return any(same_matrix(other, key) for other in _table())


def same_matrix(key: str, other: str) -> bool:
    """Whether two classes are of one product and differ in rows an expert alone."""
    product, _, *matrix = key.split()
    others, _, *other_matrix = other.split()
    return (product, matrix) == (others, other_matrix)


def distance(key: str, other: str) -> float:
    """The sum of the distances of two classes' logarithms."""
    return sum(abs(float(a) - float(b)) for a, b in zip(key.split()[1:], other.split()[1:], strict=True))


@functools.cache
def nearest(key: str) -> tuple[Tile, ...]:
    """The product's tiles, that of the class itself or the nearest in the sum of logarithms' distances first."""
    product = key.split()[0]
    keys = sorted((other for other in _table() if other.split()[0] == product), key=lambda other: distance(other, key))
    return tuple(dict.fromkeys(Tile(**_table()[other]) for other in keys)) or (Tile(),)


@contextmanager
def pretend(rows_per_expert: int, experts: int) -> Iterator[None]:
    """Within, tiles are chosen as if `experts` experts had `rows_per_expert` rows each; nothing is timed.

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
    return _pretended[-1][0] if _pretended else rows // max(experts, 1)


def all_rows(rows: int) -> int:
    """Rows of all experts."""
    return _pretended[-1][1] if _pretended else rows


def all_loads() -> list[int]:
    """Rows an expert that represent every class of load: half steps of log2, as in `shape_class`."""
    loads = dict.fromkeys(round(2 ** (half / 2)) for half in range(2 * (MOST_ROWS.bit_length() - 1) + 1))
    return list(loads)
