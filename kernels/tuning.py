"""Which tile a product runs with: by shape class from a committed table. Knows shapes alone, never data.

Shapes: R rows, E experts, N columns and K inner width of a product.
"""

from __future__ import annotations

import functools
import json
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
    """The key of the committed table: powers of two around each size."""

    def power(value: int) -> int:
        return max(value, 1).bit_length() - 1

    return f"{product} rows2^{power(rows_per_expert)} n2^{power(n)} k2^{power(k)}"


def pick(product: str, *, rows: int, experts: int, n: int, k: int) -> Tile:
    """The committed tile of this shape class, or the product's default."""
    entry = _table().get(shape_class(product, rows_per_expert=rows // max(experts, 1), n=n, k=k))
    if entry is None:
        entry = _table().get(product, {})
    return Tile(**entry)
