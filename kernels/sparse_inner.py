"""SᵀD, and DS as its transpose: the weights' gradients, whose inner dimension is an expert's rows. Any chip and Triton.

A tile is a block column of the topology by BN columns of the dense operand. The secondary index gives the block
column's first block; an expert's rows are adjacent, so they are walked as one range.

Shapes: R rows, E experts, N block columns, B block, BN x BK the rest of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.launch import load_multiple, multiple
from foundry_moe_kernels.sparse_rows import swizzle


@triton.jit
def inner_kernel(
    s_ptr, b_ptr, out_ptr,
    starts, sizes, heights, values, rows_Z, transposed_Z, column_offsets, order_E, widths_E, columns_E,
    column_experts, column_locals, columns, width, b_row, b_n, out_expert, out_column, out_n,
    UNIFORM: tl.constexpr, STACKED: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, ALIGN: tl.constexpr, ALONG: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = Sᵀ B, rows of S's columns by `columns` of B. An expert without rows gets zeros.

    width: of every expert, where UNIFORM; then the experts with the most rows come first. ALIGN, ALONG: as in
    `rows_kernel`, ALONG of the result.
    TURNED: S is read as Sᵀ, not turned in shared memory, where Triton copies four-byte elements one by one for that.
    """
    columns, width, b_row = multiple(columns, ALIGN), multiple(width, ALIGN), multiple(b_row, ALIGN)
    out_expert = multiple(out_expert, ALIGN)
    if ALONG:
        out_n = multiple(out_n, ALIGN)
    else:
        out_column = multiple(out_column, ALIGN)
    wide = tl.cdiv(columns, BN)
    n = tl.program_id(0) // wide
    tile = tl.program_id(0) - n * wide
    if UNIFORM:
        tall = tl.cdiv(width, BLOCK)
        local = n % tall
        e = tl.load(order_E + n // tall)
    else:
        e, local = tl.load(column_experts + n), tl.load(column_locals + n)
        width = load_multiple(widths_E + e, ALIGN)
        tall = tl.cdiv(width, BLOCK)
    column, tile = swizzle(local * wide + tile, tall, wide, GROUP)
    n = e * tall + column if UNIFORM else n + column - local
    first = tl.load(column_offsets + n)
    blocks = tl.load(column_offsets + n + 1) - first
    i, j, k = column * BLOCK + tl.arange(0, BLOCK), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    keep_i, keep_j = i < width, j < columns
    acc = tl.zeros((BLOCK, BN), tl.float32)
    if blocks > 0:
        m = tl.load(rows_Z + tl.load(transposed_Z + first))
        start = tl.load(starts + m).to(tl.int64)
        rows = (blocks - 1) * BLOCK + tl.load(sizes + m + blocks - 1)
        origin = start * width if UNIFORM else load_multiple(values + m, ALIGN)
        if TURNED:
            s = s_ptr + origin + k.to(tl.int64)[None, :] * width + i[:, None]
        else:
            s = s_ptr + origin + k.to(tl.int64)[:, None] * width + i[None, :]
        b = b_ptr + (start + k)[:, None] * b_row + j[None, :] * b_n
        for step in range(0, rows, BK):
            keep_k = step + k < rows
            b_tile = tl.load(b, mask=keep_k[:, None] if EVEN_N else keep_k[:, None] & keep_j[None, :], other=0.0)
            if TURNED:
                turned = tl.load(s, mask=keep_k[None, :] if EVEN_M else keep_k[None, :] & keep_i[:, None], other=0.0)
            else:
                s_tile = tl.load(s, mask=keep_k[:, None] if EVEN_M else keep_k[:, None] & keep_i[None, :], other=0.0)
                turned = tl.trans(s_tile)
            acc = tl.dot(turned, b_tile, acc, input_precision=PRECISION)
            s += BK * width
            b += BK * b_row
    base = e.to(tl.int64) * out_expert if STACKED else load_multiple(columns_E + e, ALIGN).to(tl.int64) * out_column
    out = out_ptr + base + i.to(tl.int64)[:, None] * out_column + j.to(tl.int64)[None, :] * out_n
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=keep_i[:, None] & keep_j[None, :])
