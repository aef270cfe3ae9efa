"""A matrix copied so that its rows are contiguous, whole lines of memory read and written. For any chip and Triton.

Shapes: R rows, N columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import launch
from foundry_moe_kernels.sizes import cdiv
from torch import Tensor

_TILE = 64  # rows and columns of a program: lines of 128 bytes on both sides for 16-bit elements


@triton.jit
def _transpose_kernel(in_ptr, out_ptr, rows, columns, in_stride, TILE: tl.constexpr):
    """out [rows, columns] from in [columns, rows]."""
    wide = tl.cdiv(columns, TILE)
    r = (tl.program_id(0) // wide) * TILE + tl.arange(0, TILE)
    n = (tl.program_id(0) % wide) * TILE + tl.arange(0, TILE)
    keep = (n < columns)[:, None] & (r < rows)[None, :]
    tile = tl.load(in_ptr + n.to(tl.int64)[:, None] * in_stride + r[None, :], mask=keep)
    keep = (r < rows)[:, None] & (n < columns)[None, :]
    tl.store(out_ptr + r.to(tl.int64)[:, None] * columns + n[None, :], tl.trans(tile), mask=keep)


def row_major(matrix_RN: Tensor) -> Tensor:
    """The matrix itself, or its copy with contiguous rows where its columns are contiguous and its rows are not."""
    rows, columns = matrix_RN.shape
    along, across = matrix_RN.stride()
    if along != 1 or across == 1 or matrix_RN.numel() == 0:
        return matrix_RN
    out_RN = torch.empty(rows, columns, dtype=matrix_RN.dtype, device=matrix_RN.device)
    launch(
        _transpose_kernel, (cdiv(rows, _TILE) * cdiv(columns, _TILE),),
        matrix_RN, out_RN, rows, columns, across, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return out_RN
