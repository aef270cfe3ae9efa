"""Which tile a product runs with: by shape class from a committed table. Knows shapes alone, never data.

Shapes: R rows, E experts, N columns and K inner width of a product.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("hopper.json")


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A configuration of a Hopper kernel: `group` tiles share an operand in L2, `split` parts leave the epilogue."""

    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 3
    warps: int = 8
    group: int = 8
    split: int = 2
    flatten: int = 1
    per_sm: int = 1
    fused: int = 1  # the activation's backward in the epilogue of the product before it


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
def _nearest(product: str, rows_per_expert: int, n: int, k: int) -> Tile:
    """The class itself, or the one of this product that is nearest in the sum of logarithms' distances."""
    wanted = (_half(rows_per_expert), _half(n), _half(k))
    best, entry = math.inf, {}
    for key, candidate in _table().items():
        name, *sizes = key.split()
        distance = sum(abs(float(size) - want) for size, want in zip(sizes, wanted, strict=True))
        if name == product and distance < best:
            best, entry = distance, candidate
    return Tile(**entry)


def pick(product: str, *, rows: int, experts: int, n: int, k: int) -> Tile:
    """The committed tile of this shape class or of the nearest; the defaults where the table has no such product."""
    return _nearest(product, rows // max(experts, 1), n, k)
