"""Block-sparse topology of a dMoE layer, built on the device from tokens per expert without a host synchronisation.

A shortcut of the hybrid blocked CSR-COO format (`block_products.BlockIndex`) for a matrix that is block-diagonal: the
blocks of an expert are adjacent in row order and in column order, so kernels walk them as one box and need no column
index and no secondary index. Whoever builds a matrix of another topology takes that format.

Rows are not padded. Block row m covers the dense rows [starts[m], starts[m] + sizes[m]), at most B of them and fewer
at an expert's end. The values of a block row lie row by row, its blocks side by side: element (i, j) of its n-th block
is at `values[m] + i * width + n * B + j`. For experts of one width F that is the plain row-major matrix [R, F].

Shapes: R rows, E experts, B block, M block rows at most, N block columns, Z blocks at most.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from torch import Tensor

_GATHERS = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6))
BLOCK_ROWS = (128, 192)  # of the Hopper products' tiles: those of three consumers are tall
_CHUNK = 64  # indices that one program of the topology's kernel fills in


@dataclass(frozen=True)
class Topology:
    """int32 index tensors unless noted. Past the blocks in use, sizes are 0 and the rest is undefined."""

    block: int
    num_rows: int
    widths: tuple[int, ...]  # dense columns of each expert
    values_M: Tensor  # int64, first value
    starts_M: Tensor  # first dense row
    sizes_M: Tensor
    experts_M: Tensor
    locals_M: Tensor  # block row within its expert
    heights_M: Tensor  # block rows of its expert
    row_offsets_M1: Tensor  # CSR; the last one is the number of blocks in use
    rows_Z: Tensor  # COO
    column_rows_N: Tensor  # block row of the first block of a block column
    column_heights_N: Tensor  # blocks of a block column
    order_E: Tensor  # experts, most rows first
    widths_E: Tensor
    columns_E: Tensor  # first dense column
    column_experts_N: Tensor
    column_locals_N: Tensor  # block column within its expert

    @property
    def num_columns(self) -> int:
        """C: dense columns of all experts."""
        return sum(self.widths)

    @property
    def uniform(self) -> bool:
        """Experts of one width: values are a matrix [R, F]."""
        return len(set(self.widths)) == 1

    @property
    def common_width(self) -> int:
        """The greatest common divisor of the widths."""
        return math.gcd(*self.widths)

    @property
    def num_values(self) -> int:
        """Elements that hold the values of any load."""
        return self.num_rows * max(self.widths)

    @property
    def block_rows(self) -> int:
        return self.starts_M.shape[0]

    @property
    def block_columns(self) -> int:
        return self.column_experts_N.shape[0]


def max_block_rows(num_rows: int, num_experts: int, block: int) -> int:
    """Most block rows that any load needs: every expert may end in a partial block."""
    return num_rows // block + min(num_experts, num_rows)


@triton.jit
def _owner(at, ends_E, EXPERTS: tl.constexpr):
    """For each index the first expert that ends past it, from running sums; past all of them, the last."""
    return tl.minimum(tl.sum((ends_E[None, :] <= at[:, None]).to(tl.int32), axis=1), EXPERTS - 1)


@triton.jit
def _take(values_E, own, EXPERTS: tl.constexpr):
    """values_E[own]. Gathers are faster on Triton 3.6, and Triton 3.3 fails to compile this kernel with them."""
    if _GATHERS:
        return tl.gather(values_E, own, axis=0)
    else:
        mine = own[:, None] == tl.arange(0, EXPERTS)[None, :]
        return tl.sum(tl.where(mine, values_E[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["num_experts", "block_rows", "blocks", "block_columns"])
def _topology_kernel(
    offsets_ptr, widths_ptr, values_ptr, starts_ptr, sizes_ptr, experts_ptr, locals_ptr, heights_ptr, row_offsets_ptr,
    rows_ptr, column_rows_ptr, column_heights_ptr, order_ptr,
    num_experts, block_rows, blocks, block_columns,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    here = e < num_experts
    end = tl.load(offsets_ptr + e, mask=here, other=0)
    start = tl.load(offsets_ptr + e - 1, mask=(e > 0) & here, other=0)
    size = tl.where(here, tl.maximum(end - start, 0), 0)
    width = tl.load(widths_ptr + e, mask=here, other=0)
    height, wide = (size + BLOCK - 1) // BLOCK, (width + BLOCK - 1) // BLOCK
    row_end, block_end, column_end = tl.cumsum(height, 0), tl.cumsum(height * wide, 0), tl.cumsum(wide, 0)
    row_first, block_first = row_end - height, block_end - height * wide
    area = size.to(tl.int64) * width
    value_first = tl.cumsum(area, 0) - area
    used = tl.sum(height * wide)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)

    own = _owner(at, row_end, EXPERTS)
    local = at - _take(row_first, own, EXPERTS)
    some = at < tl.sum(height)
    tall, broad = _take(height, own, EXPERTS), _take(wide, own, EXPERTS)
    keep = at < block_rows
    tl.store(starts_ptr + at, _take(start, own, EXPERTS) + local * BLOCK, mask=keep)
    left = _take(size, own, EXPERTS) - local * BLOCK
    tl.store(sizes_ptr + at, tl.where(some, tl.minimum(left, BLOCK), 0), mask=keep)
    tl.store(experts_ptr + at, own, mask=keep)
    tl.store(locals_ptr + at, local, mask=keep)
    tl.store(heights_ptr + at, tall, mask=keep)
    inside = local.to(tl.int64) * BLOCK * _take(width, own, EXPERTS)
    tl.store(values_ptr + at, _take(value_first, own, EXPERTS) + inside, mask=keep)
    offset = tl.where(some, _take(block_first, own, EXPERTS) + local * broad, used)
    tl.store(row_offsets_ptr + at, offset, mask=at <= block_rows)

    own = _owner(at, block_end, EXPERTS)
    row = (at - _take(block_first, own, EXPERTS)) // tl.maximum(_take(wide, own, EXPERTS), 1)
    tl.store(rows_ptr + at, _take(row_first, own, EXPERTS) + row, mask=at < blocks)

    own = _owner(at, column_end, EXPERTS)
    keep = at < block_columns
    tl.store(column_rows_ptr + at, _take(row_first, own, EXPERTS), mask=keep)
    tl.store(column_heights_ptr + at, _take(height, own, EXPERTS), mask=keep)

    my_end = tl.load(offsets_ptr + at, mask=at < num_experts, other=0)
    mine_size = my_end - tl.load(offsets_ptr + at - 1, mask=(at > 0) & (at < num_experts), other=0)
    tie = (size[None, :] == mine_size[:, None]) & (e[None, :] < at[:, None])
    ahead = here[None, :] & ((size[None, :] > mine_size[:, None]) | tie)
    tl.store(order_ptr + tl.sum(ahead.to(tl.int32), axis=1), at, mask=at < num_experts)


@functools.lru_cache(maxsize=256)
def column_tables(widths: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The host's tables, on the device: widths_E, columns_E, column_experts_N, column_locals_N, int32."""
    wide = [cdiv(width, block) for width in widths]
    tables = (
        list(widths),
        [sum(widths[:e]) for e in range(len(widths))],
        [e for e, count in enumerate(wide) for _ in range(count)],
        [j for count in wide for j in range(count)],
    )
    a, b, c, d = (torch.tensor(table, dtype=torch.int32).to(device) for table in tables)
    return a, b, c, d


def topology_from_offsets(offsets_E: Tensor, num_rows: int, widths: Sequence[int], block: int) -> Topology:
    """The topology of x·W1ᵀ: expert e's rows meet expert e's columns. One launch.

    Args:
        offsets_E: the row after the last one of each expert, int32.
        num_rows: R, rows allocated; the loads may add up to less.
        widths: columns of each expert (equal or not, multiples of the block or not).
        block: B, a power of two, 16 or more.
    """
    return unpack_topology(pack_topology(offsets_E, num_rows, widths, block), num_rows, widths, block)


@functools.lru_cache(maxsize=256)  # called by every product
def _block_columns(widths: tuple[int, ...], block: int) -> tuple[int, int]:
    """Block columns of the widest expert, and of all."""
    wide = [cdiv(width, block) for width in widths]
    return max(wide), sum(wide)


def _lengths(num_rows: int, widths: Sequence[int], block: int) -> list[int]:
    """Integers of each table: values_M (two each), five by block row, row offsets, rows_Z, two by column, order."""
    rows = max(max_block_rows(num_rows, len(widths), block), 1)
    widest, all_columns = _block_columns(tuple(widths), block)
    return [2 * rows] + [rows] * 5 + [rows + 1] + [rows * widest] + [all_columns] * 2 + [len(widths)]


def packed_topology_size(num_rows: int, widths: Sequence[int], block: int) -> int:
    """Integers of `pack_topology`."""
    return sum(4 * cdiv(length, 4) for length in _lengths(num_rows, widths, block))


def _split(packed: Tensor, num_rows: int, widths: Sequence[int], block: int) -> list[Tensor]:
    lengths = _lengths(num_rows, widths, block)
    aligned = [4 * cdiv(length, 4) for length in lengths]  # to 16 bytes: kernels are compiled for it
    parts = packed.split_with_sizes(aligned)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def pack_topology(offsets_E: Tensor, num_rows: int, widths: Sequence[int], block: int) -> Tensor:
    """The tables that depend on the loads, as one int32 tensor that all products of a layer share."""
    device, experts = offsets_E.device, len(widths)
    widths_E = column_tables(tuple(widths), block, device)[0]
    packed = torch.empty(packed_topology_size(num_rows, widths, block), dtype=torch.int32, device=device)
    values_M, starts_M, *tables = _split(packed, num_rows, widths, block)
    rows, blocks, columns = starts_M.shape[0], tables[5].shape[0], tables[6].shape[0]
    launch(
        _topology_kernel, (cdiv(max(rows + 1, blocks, columns, experts), _CHUNK),),
        offsets_E.contiguous(), widths_E, values_M.view(torch.int64), starts_M, *tables,
        experts, rows, blocks, columns, EXPERTS=next_power_of_2(experts), BLOCK=block, CHUNK=_CHUNK,
    )  # fmt: skip
    return packed


def unpack_topology(packed: Tensor, num_rows: int, widths: Sequence[int], block: int) -> Topology:
    """The topology that `pack_topology` packed for the same arguments: views, in the order of `Topology`'s fields."""
    widths = tuple(widths)
    values_M, *tables = _split(packed, num_rows, widths, block)
    tables = [values_M.view(torch.int64), *tables, *column_tables(widths, block, packed.device)]
    return Topology(block, num_rows, widths, *tables)


@triton.jit(do_not_specialize=["num_experts", "most", "tall_most"])
def _block_rows_kernel(
    offsets_ptr, entries_ptr, counts_ptr, order_ptr, num_experts, most, tall_most,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Programs (i, 0) make the table of blocks of BLOCK rows and the order, programs (i, 1) that of TALL rows."""
    is_tall = tl.program_id(1)
    block = BLOCK + is_tall * (TALL - BLOCK)
    e = tl.arange(0, EXPERTS)
    end = tl.load(offsets_ptr + e, mask=e < num_experts, other=0)
    start = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e < num_experts), other=0)
    size = tl.where(e < num_experts, end - start, -1)
    blocks = (tl.maximum(size, 0) + block - 1) // block
    blocks_end = tl.cumsum(blocks, axis=0)
    if tl.program_id(0) == 0:
        count_ptr = counts_ptr + 3 * is_tall
        tl.store(count_ptr, tl.sum(blocks))
        tl.store(count_ptr + 1, 0)
        tl.store(count_ptr + 2, 0)
    m = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    first = blocks_end - blocks
    mine = (m[:, None] >= first[None, :]) & (m[:, None] < blocks_end[None, :])
    entry = entries_ptr + (is_tall * most + m) * 4
    keep = m < most + is_tall * (tall_most - most)
    tl.store(entry, tl.sum(tl.where(mine, e[None, :], 0), axis=1), mask=keep)
    tl.store(entry + 1, tl.sum(tl.where(mine, start[None, :], 0), axis=1), mask=keep)
    tl.store(entry + 2, tl.sum(tl.where(mine, size[None, :], 0), axis=1), mask=keep)
    tl.store(entry + 3, tl.sum(tl.where(mine, (m[:, None] - first[None, :]) * block, 0), axis=1), mask=keep)
    # m as experts now: how many have more rows, or as many and a lower number
    ranked = m < num_experts * (1 - is_tall)
    my_end = tl.load(offsets_ptr + m, mask=ranked, other=0)
    my_size = my_end - tl.load(offsets_ptr + m - 1, mask=(m > 0) & ranked, other=0)
    ahead = (size[None, :] > my_size[:, None]) | ((size[None, :] == my_size[:, None]) & (e[None, :] < m[:, None]))
    tl.store(order_ptr + tl.sum(ahead.to(tl.int32), axis=1), m, mask=ranked)


@functools.lru_cache(maxsize=256)
def _most(num_rows: int, experts: int, blocks: tuple[int, int]) -> tuple[int, int]:
    short, tall = (max(max_block_rows(num_rows, experts, block), 1) for block in blocks)
    return short, tall


def split_rows(
    packed: Tensor, num_rows: int, experts: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Views of what `pack_rows` gives for the same arguments.

    Returns:
        for each block size int32 [M, 4]: expert, first row of the expert, rows of the expert, row within the expert;
        and int32 [3], the number of block rows in use and two zeros, which products count with.
        Then int32 [E], the experts from the most rows to the fewest.
    """
    most, tall_most = _most(num_rows, experts, BLOCK_ROWS)
    entries, tall, order_E, count, tall_count = packed.split_with_sizes((4 * most, 4 * tall_most, experts, 3, 3))
    return (entries.view(-1, 4), count), (tall.view(-1, 4), tall_count), order_E


def packed_size(num_rows: int, experts: int) -> int:
    """Integers of `pack_rows`."""
    return 4 * sum(_most(num_rows, experts, BLOCK_ROWS)) + experts + 6


def pack_rows(offsets_E: Tensor, num_rows: int) -> Tensor:
    """The block rows alone, of two sizes, in one launch, for the kernels of experts of one width.

    Returns:
        int32, one tensor for all tables, that all products of a layer share: see `split_rows`.
    """
    assert offsets_E.dtype is torch.int32 and offsets_E.is_contiguous()
    experts = offsets_E.shape[0]
    packed = torch.empty(packed_size(num_rows, experts), dtype=torch.int32, device=offsets_E.device)
    (entries_M4, count), (tall_M4, _), order_E = split_rows(packed, num_rows, experts)
    most, tall_most = entries_M4.shape[0], tall_M4.shape[0]
    block, tall = BLOCK_ROWS
    chunk = 32
    launch(  # the second table and its count lie behind the first ones
        _block_rows_kernel, (cdiv(max(most, experts), chunk), 2),
        offsets_E, entries_M4, count, order_E, experts, most, tall_most,
        EXPERTS=next_power_of_2(experts), BLOCK=block, TALL=tall, CHUNK=chunk,
    )  # fmt: skip
    return packed
