"""SDD, DSD and DDS of a block-sparse matrix of any topology, on any chip from sm_80 up and Triton 3.3 and later.

Hybrid blocked CSR-COO (Gale et al. 2022, MegaBlocks, section 5.1). Values are [Z, B, B], block row by block row.
`sdd_kernel` finds its blocks by the row and column index of each (COO), `dsd_kernel` walks a block row by row offsets
and column indices (CSR). Of the transpose it walks a block column by the secondary index, which lists the blocks column
by column; values are never transposed or copied. Layers with experts have a shortcut: `sparse_kernels`.

Shapes: S [M B, N B] with Z blocks, B block, K inner width, C columns of the dense operand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, launch
from foundry_moe_kernels.sparse_kernels import load_within, swizzle
from foundry_moe_kernels.sparse_tiles import SparseTile, choose
from torch import Tensor

_GROUP_ROWS = 8  # block rows whose tiles follow one another in `sdd`, column by column: they share B's columns in L2
_LONG_ROW = 8  # blocks of a row on average from which a tile of `sdd` may cover several: the last is partly empty


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Where the blocks of a matrix are. Tables are int32 or int16, offsets int32 or int64, all contiguous.

    Args:
        rows_Z, columns_Z: block row and block column of each block, row by row (COO).
        row_offsets_M1: the first block of each block row, and Z (CSR).
        transposed_Z, transposed_rows_Z: the blocks column by column (the secondary index), and the block row of each.
        column_offsets_N1: the first entry of each block column in it, and Z.
    """

    block: int
    rows_Z: Tensor
    columns_Z: Tensor
    row_offsets_M1: Tensor
    transposed_Z: Tensor
    transposed_rows_Z: Tensor
    column_offsets_N1: Tensor
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return self.rows_Z.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.block * (self.row_offsets_M1.shape[0] - 1), self.block * (self.column_offsets_N1.shape[0] - 1)

    def tiles(self, wide: int) -> Tensor:
        """int32 [tiles, 3]: the first block of each tile of `sdd` (-1 past the last), its block row, and how many
        blocks of the row are left from there. A tile covers up to `wide` of them.

        In the order in which they are computed. Made on the device when first asked for.
        """
        if wide not in self._tiles:
            rows_Z, offsets = self.rows_Z.long(), self.row_offsets_M1.long()
            z = torch.arange(self.blocks, device=rows_Z.device)
            columns = cdiv(self.shape[1], self.block)
            order = (rows_Z // _GROUP_ROWS * columns + self.columns_Z) * _GROUP_ROWS + rows_Z % _GROUP_ROWS
            first = (z - offsets[rows_Z]) % wide == 0
            order = torch.where(first, order, torch.iinfo(torch.int64).max)
            most = min((self.blocks + (wide - 1) * (offsets.shape[0] - 1)) // wide, self.blocks)
            chosen = order.argsort()[:most]
            row = rows_Z[chosen]
            tiles = torch.where(first[chosen], chosen, -1), row, offsets[row + 1] - chosen
            self._tiles[wide] = torch.stack(tiles, 1).int()
        return self._tiles[wide]


@triton.jit(do_not_specialize=["blocks"])
def sdd_kernel(
    a_ptr, b_ptr, out_ptr, tiles, columns_Z, blocks, inner, a_row, a_k, b_k, b_n,
    BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Values of A B at the blocks of S, BN / BLOCK of a block row at a time, wherever their columns are.

    Where BN is less, as many programs share a block.
    """
    PARTS: tl.constexpr = (BLOCK + BN - 1) // BN
    RUN: tl.constexpr = BLOCK if BLOCK < BN else BN
    tile = tiles + tl.program_id(0) // PARTS * 3
    z, m, left = tl.load(tile), tl.load(tile + 1).to(tl.int64), tl.load(tile + 2)
    if z < 0:
        return
    i, j, k = tl.arange(0, BLOCK), tl.program_id(0) % PARTS * BN + tl.arange(0, BN), tl.arange(0, BK)
    nth = j // BLOCK
    n = tl.load(columns_Z + tl.minimum(z + nth, blocks - 1)).to(tl.int64)  # past the row's end: never stored
    column = tl.max_contiguous(tl.multiple_of(n * BLOCK + j % BLOCK, RUN), RUN)
    a = a_ptr + (m * BLOCK + i)[:, None] * a_row + k.to(tl.int64)[None, :] * a_k
    b = b_ptr + k.to(tl.int64)[:, None] * b_k + column[None, :] * b_n
    acc = tl.zeros((BLOCK, BN), tl.float32)
    for step in range(0, inner, BK):
        within = None if EVEN_K else step + k < inner
        acc = tl.dot(load_within(a, None, within), load_within(b, within, None), acc, input_precision=PRECISION)
        a += BK * a_k
        b += BK * b_k
    out = out_ptr + (z + nth).to(tl.int64)[None, :] * (BLOCK * BLOCK) + i[:, None] * BLOCK + (j % BLOCK)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(nth < left)[None, :])


@triton.jit
def _block(t, transposed_Z, others_Z, TRANSPOSED: tl.constexpr):
    """The t-th block of S (of Sᵀ, by the secondary index) and the block of the inner dimension where it lies."""
    z = tl.load(transposed_Z + t).to(tl.int64) if TRANSPOSED else t.to(tl.int64)
    return z, tl.load(others_Z + t).to(tl.int64)


@triton.jit
def dsd_kernel(
    s_ptr, b_ptr, out_ptr, offsets, transposed_Z, others_Z,
    block_rows, columns, b_k, b_n, out_row, out_n,
    BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr,
    TRANSPOSED: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = S B, or Sᵀ B where TRANSPOSED. A block row without blocks gets zeros.

    offsets, others_Z: row offsets and columns of S, or column offsets of S and the rows of its secondary index.
    TURNED: a block is read as its transpose, not turned in shared memory (see `sparse_kernels.inner_kernel`).
    """
    wide = tl.cdiv(columns, BN)
    m, tile = swizzle(tl.program_id(0), block_rows, wide, GROUP)
    first = tl.load(offsets + m).to(tl.int32)
    last = tl.load(offsets + m + 1).to(tl.int32)
    i, j, k = tl.arange(0, BLOCK), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    within_j = None if EVEN_N else j < columns
    if not TRANSPOSED:
        s_at, s_k = i[:, None] * BLOCK + k[None, :], 1
    elif TURNED:
        s_at, s_k = k[None, :] * BLOCK + i[:, None], BLOCK
    else:
        s_at, s_k = k[:, None] * BLOCK + i[None, :], BLOCK
    b_at = k.to(tl.int64)[:, None] * b_k + j.to(tl.int64)[None, :] * b_n
    acc = tl.zeros((BLOCK, BN), tl.float32)
    if first < last:
        z, n = _block(first, transposed_Z, others_Z, TRANSPOSED)
        for step in range((last - first) * (BLOCK // BK)):
            inside = step % (BLOCK // BK) * BK
            s = tl.load(s_ptr + (z * (BLOCK * BLOCK) + inside * s_k) + s_at)
            if TRANSPOSED and not TURNED:
                s = tl.trans(s)
            b = load_within(b_ptr + (n * BLOCK + inside) * b_k + b_at, None, within_j)
            acc = tl.dot(s, b, acc, input_precision=PRECISION)
            # the next step's block, so that its index is there when its address is computed
            t = tl.minimum(first + (step + 1) // (BLOCK // BK), last - 1)
            z, n = _block(t, transposed_Z, others_Z, TRANSPOSED)
    out = out_ptr + (m * BLOCK + i).to(tl.int64)[:, None] * out_row + j.to(tl.int64)[None, :] * out_n
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(j < columns)[None, :])


def _strided(matrix: Tensor) -> Tensor:
    """The matrix, or a copy of it if neither its rows nor its columns are contiguous."""
    return matrix if 1 in matrix.stride() and 0 not in matrix.stride() else matrix.contiguous()


def _options(index: BlockIndex, tile: SparseTile, tf32: bool) -> dict[str, object]:
    return {
        "BLOCK": index.block, "BN": tile.bn, "BK": min(tile.bk, index.block),
        "PRECISION": "tf32" if tf32 else "ieee", "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def sdd(
    a_RK: Tensor, b_KC: Tensor, index: BlockIndex, *, tf32: bool = False, tile: SparseTile | None = None
) -> Tensor:  # fmt: skip
    """a b at the blocks of S: values [Z, B, B]. Operands may lie transposed in memory.

    Args:
        tf32: fp32 operands are rounded to tf32.
    """
    assert (a_RK.shape[0], b_KC.shape[1]) == index.shape and a_RK.shape[1] == b_KC.shape[0]
    block, inner = index.block, a_RK.shape[1]
    values = torch.empty(index.blocks, block, block, dtype=a_RK.dtype, device=a_RK.device)
    if values.numel():
        a_RK, b_KC = _strided(a_RK), _strided(b_KC)
        if tile is None:
            long, along = index.blocks >= _LONG_ROW * (index.row_offsets_M1.shape[0] - 1), b_KC.stride(0) == 1
            tile = choose(
                "sdd along" if along else "sdd", a_RK.device, block, a_RK.dtype,
                columns=index.shape[1] if long else block, inner=inner, tf32=tf32, along=along,
            )  # fmt: skip
        tiles = index.tiles(cdiv(tile.bn, block))
        launch(
            sdd_kernel, (tiles.shape[0] * cdiv(block, tile.bn),),
            a_RK, b_KC, values, tiles, index.columns_Z, index.blocks, inner, *a_RK.stride(), *b_KC.stride(),
            EVEN_K=inner % min(tile.bk, block) == 0, **_options(index, tile, tf32),
        )  # fmt: skip
    return values


def dsd(
    values: Tensor, b_KC: Tensor, index: BlockIndex, *, transposed: bool = False, tf32: bool = False,
    tile: SparseTile | None = None,
) -> Tensor:  # fmt: skip
    """S b, or Sᵀ b: dense [M B, C] ([N B, C]). b may lie transposed in memory; the sums are fp32.

    DDS is its transpose: a S = (Sᵀ aᵀ)ᵀ.
    """
    block, columns = index.block, b_KC.shape[1]
    rows, inner = reversed(index.shape) if transposed else index.shape
    assert values.shape == (index.blocks, block, block) and values.is_contiguous() and b_KC.shape[0] == inner
    out = torch.empty(rows, columns, dtype=values.dtype, device=values.device)
    if out.numel():
        b_KC = _strided(b_KC)
        tile = tile or choose(
            "inner" if transposed else "dsd", values.device, block, values.dtype, columns=columns,
            inner=index.blocks * block * block // rows, tf32=tf32, along=b_KC.stride(0) == 1 and not transposed,
        )  # fmt: skip
        launch(
            dsd_kernel, (rows // block * cdiv(columns, tile.bn),),
            values, b_KC, out, index.column_offsets_N1 if transposed else index.row_offsets_M1, index.transposed_Z,
            index.transposed_rows_Z if transposed else index.columns_Z,
            rows // block, columns, *b_KC.stride(), *out.stride(),
            GROUP=tile.group, EVEN_N=columns % tile.bn == 0, TRANSPOSED=transposed,
            TURNED=tf32 and values.element_size() == 4, **_options(index, tile, tf32),
        )  # fmt: skip
    return out
