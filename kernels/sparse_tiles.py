"""Which tile a block-sparse product runs with, by the chip's shared memory and by measurement. Knows shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from foundry_moe_kernels.sizes import next_power_of_2
from foundry_moe_kernels.topology import Topology

# Block rows of a topology that layers use: the paper's 128
BLOCK = 128
# Shared memory that one program may take, by compute capability (CUDA programming guide, table of technical
# specifications); what is not listed gets the least of its kind
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True, kw_only=True)
class SparseTile:
    """A block row by `bn` columns, `bk` deep; `group` block rows share an operand in L2."""

    bn: int = 128
    bk: int = 64
    stages: int = 3
    warps: int = 4
    group: int = 8

    def shared_bytes(self, block: int, itemsize: int, operands: int = 1) -> int:
        """What the pipeline holds: `operands` matrices meet one tile of rows."""
        return self.stages * (block + operands * self.bn) * self.bk * itemsize


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take on this device; in the interpreter, a Hopper's."""
    if device.type != "cuda":
        return SHARED_BYTES[90]
    major, minor = torch.cuda.get_device_capability(device)
    return SHARED_BYTES.get(10 * major + minor, SHARED_BYTES[80] if major in (8, 10) else SHARED_BYTES[86])


def fit(tile: SparseTile, block: int, itemsize: int, limit_bytes: int, operands: int = 1) -> SparseTile:
    """The tile with fewer stages, then less depth, then fewer columns, until it fits."""
    while tile.shared_bytes(block, itemsize, operands) > limit_bytes:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.bk > 32:
            tile = replace(tile, bk=tile.bk // 2)
        elif tile.bn > block:
            tile = replace(tile, bn=tile.bn // 2, warps=4)
        else:
            break
    return tile


def choose(product: str, topology: Topology, dtype: torch.dtype, *, columns: int, inner: int) -> SparseTile:
    """The tile of a product: sdd, act (it and its activation), glu (two of them), dsd or inner (weights' gradients).

    Args:
        columns, inner: of a tile's row, and how deep it is on average.
    """
    device, block = topology.starts_M.device, topology.block
    if _is_hopper(device):
        tile = _measured(product, inner)
    else:  # four warps' registers would not do for an activation, nor for a turned operand
        tile = SparseTile(bk=32, stages=4, warps=4 if product in ("sdd", "dsd") else 8)
    if dtype.itemsize == 4:
        tile = replace(tile, bk=32)
    if block < BLOCK:
        tile = replace(tile, bn=max(min(64, next_power_of_2(columns)), 16), bk=max(min(32, next_power_of_2(inner)), 16))
    bn = min(tile.bn, max(next_power_of_2(columns), block))
    if product in ("sdd", "act", "glu"):  # a tile covers whole blocks of one expert, or parts of one
        while bn > block and any(-(-width // block) * block % bn for width in topology.widths):
            bn //= 2
    if bn < tile.bn:
        tile = replace(tile, bn=bn, warps=8 if product in ("act", "glu") and bn >= BLOCK else 4)
    return fit(tile, block, dtype.itemsize, shared_bytes(device), operands=2 if product == "glu" else 1)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _measured(product: str, inner: int) -> SparseTile:
    """On an H100 (benchmarks/sparse_tiles.py)."""
    if product == "glu":
        return SparseTile(bn=128, bk=32, stages=6, warps=8)
    if product == "inner":
        return SparseTile(bn=256, warps=8) if inner >= 2048 else SparseTile(stages=3 if inner >= 512 else 2)
    return SparseTile(bn=256, stages=4, warps=8)
