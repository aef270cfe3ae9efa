"""The tile of a block-sparse product, by its shape, by the chip's shared memory and by measurement."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from foundry_moe_kernels.launch import next_power_of_2

# Block rows of a topology that layers use: the paper's 128
BLOCK = 128
# Shared memory that one program may take, by compute capability (CUDA programming guide, table of technical
# specifications); unlisted chips use the smallest limit of their class
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
        """Bytes that the pipeline holds: `operands` matrices meet one tile of rows."""
        return self.stages * (block + operands * self.bn) * self.bk * itemsize


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take on this device; in the interpreter, a Hopper's."""
    known = capability(device)
    return SHARED_BYTES.get(known, SHARED_BYTES[80] if known // 10 in (8, 10) else SHARED_BYTES[86])


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


# The tiles of chips that were measured, by capability (benchmarks/sparse_tiles.py): for each product, tiles and the
# inner depth from which they are used, the deepest first. dsd2 is the sum of two, `sdd along` that of `block_products`
# whose second operand is contiguous along the inner dimension; `along` is any tf32 product whose
# second operand is contiguous along the inner dimension, `across` one where it is not. With two warps Triton avoids
# Hopper's tf32 instruction, which needs operands contiguous along it: others would be transposed four bytes at a time
# (H200: 41 to 158 TFLOP/s)
MEASURED: dict[int, dict[str, tuple[tuple[int, SparseTile], ...]]] = {
    90: {
        "sdd": ((4096, SparseTile(bn=256, stages=4, warps=8, group=4)), (0, SparseTile(bn=256, stages=4, warps=8))),
        "act": ((0, SparseTile(bn=256, stages=4, warps=8)),),
        "glu": ((0, SparseTile(bk=32, stages=6, warps=8)),),
        "dsd": (
            (4096, SparseTile(bn=256, stages=4, warps=8, group=4)),
            (1536, SparseTile(bn=256, stages=4, warps=8)),
            (0, SparseTile(bn=256, warps=8)),
        ),
        "dsd2": (
            (4096, SparseTile(bn=256, bk=32, stages=6, warps=8)),
            (0, SparseTile(bn=256, bk=32, stages=4, warps=8)),
        ),
        "inner": ((1024, SparseTile(bn=256, stages=4, warps=8)), (0, SparseTile(bk=32, stages=4))),
        "sdd along": ((0, SparseTile()),),
        "glu tf32": ((0, SparseTile(bk=32, warps=8)),),
        "along": ((0, SparseTile(bn=256, bk=32, stages=4, warps=8)),),
        "across": ((0, SparseTile(bn=64, bk=16, stages=4, warps=2)),),
    }
}


def choose(
    product: str, device: torch.device, block: int, dtype: torch.dtype, *, columns: int, inner: int,
    tf32: bool = False, along: bool = False, widths: tuple[int, ...] = (),
) -> SparseTile:  # fmt: skip
    """The tile of a product.

    `product`: sdd, sdd along, act (sdd and an activation), glu (two sdd and one), dsd, dsd2 (two dsd), inner (weights'
    gradients).

    Args:
        columns, inner: of a tile's row, and how deep it is on average.
        tf32: fp32 operands are rounded to tf32.
        along: the second operand's adjacent elements follow the inner dimension.
        widths: of a row's parts that a tile of sdd, act or glu may not cross.
    """
    measured = MEASURED.get(capability(device))
    if measured is None:  # four warps' registers would not do for an activation, nor for a turned operand
        tile = SparseTile(bk=32, stages=4, warps=4 if product in ("sdd", "sdd along", "dsd", "dsd2") else 8)
    else:
        kind = product
        if tf32 and dtype.itemsize == 4:
            kind = "glu tf32" if product == "glu" else "along" if along else "across"
        tile = next(tile for least, tile in measured[kind] if inner >= least)
    if dtype.itemsize == 4 and tile.bk > 32:
        tile = replace(tile, bk=32)
    if block < BLOCK:
        tile = replace(tile, bn=max(min(64, next_power_of_2(columns)), 16), bk=max(min(32, next_power_of_2(inner)), 16))
    bn = min(tile.bn, max(next_power_of_2(columns), block))
    if product in ("sdd", "act", "glu"):  # a tile covers whole blocks of one expert, or parts of one
        while bn > block and any(-(-width // block) * block % bn for width in widths):
            bn //= 2
    if bn < tile.bn:
        tile = replace(tile, bn=bn, warps=8 if product in ("act", "glu") and bn >= BLOCK else 4)
    return fit(tile, block, dtype.itemsize, shared_bytes(device), operands=2 if product == "glu" else 1)


@functools.cache
def capability(device: torch.device) -> int:
    """90 for sm_90; in the interpreter, that of Hopper."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
