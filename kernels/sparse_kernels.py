"""SDD and DSD of a layer with experts on two kernels with plain pointer loads, on any chip from sm_80, Triton 3.3 up.

The shortcut of `block_products` for a block-diagonal matrix that `topology` builds.

The blocks of an expert are adjacent, so they are walked as one box, without an index for each. With it the products of
a layer take 0.99 to 1.03 times as long at the MegaBlocks paper's shapes and 1.10 at Mixtral's (H100). Rows are not
padded, tokens are read where they are, and activations are computed in the product's epilogue.

`rows_kernel` (SDD, DSD): rows of an expert times its matrix. A tile is a block row of the topology by BN columns. In
SDD the columns are S's, in DSD the inner dimension is.

`inner_kernel` (SᵀD): the weights' gradients, whose inner dimension is an expert's rows. A tile is a block column of the
topology by BN columns of the dense operand.

Shapes: R rows, E experts, M block rows, N block columns, B block, BN x BK the rest of a tile, Y planes (gate and up: 2,
else 1).
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.activations import activate
from foundry_moe_kernels.launch import load_multiple, multiple


@triton.jit
def swizzle(local, height, wide, GROUP: tl.constexpr):
    """(row, column) of a tile among `height` x `wide`: GROUP rows share the columns' operand in L2."""
    group = local // (GROUP * wide)
    first = group * GROUP
    rows = tl.minimum(height - first, GROUP)
    local -= group * (GROUP * wide)
    return first + local % rows, local // rows


@triton.jit
def load_within(tile, within_rows, within_columns):
    """A tile of pointers, zeros outside of the masks of its rows and columns. None: all are within."""
    if within_rows is None and within_columns is None:
        loaded = tl.load(tile)
    elif within_rows is None:
        loaded = tl.load(tile, mask=within_columns[None, :], other=0.0)
    elif within_columns is None:
        loaded = tl.load(tile, mask=within_rows[:, None], other=0.0)
    else:
        loaded = tl.load(tile, mask=within_rows[:, None] & within_columns[None, :], other=0.0)
    return loaded


@triton.jit
def add_product(acc, s, b, within_k, within_i, within_j, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + SᵀB for tiles of pointers s [k, i] (TURNED: [i, k]) and b [k, j]."""
    turned = load_within(s, within_i, within_k) if TURNED else tl.trans(load_within(s, within_k, within_i))
    return tl.dot(turned, load_within(b, within_k, within_j), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["block_rows", "plane"])
def rows_kernel(
    a_ptr, b_ptr, a2_ptr, b2_ptr, out_ptr, h_ptr, source_ptr,
    starts, sizes, experts, locals_, heights, values, row_offsets, rows_Z, widths_E, columns_E,
    block_rows, inner, columns, a_row, a_k, b_expert, b_k, b_n, out_row, plane,
    SDD: tl.constexpr, UNIFORM: tl.constexpr, STACKED: tl.constexpr, CHOICES: tl.constexpr, PLANES: tl.constexpr,
    GLU: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, ALIGN: tl.constexpr, ALONG: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = A B at the blocks of S (SDD), or out = S B (DSD); with PLANES 2 out = A B + A2 B2.

    inner, columns: the inner width and the columns of a tile's row where they do not differ by expert. CHOICES: A's row
    r is a_ptr's row source_ptr[r] // CHOICES. GLU: of two SDDs A B and A B2, values in two planes `plane` apart, and
    h = act(A B) (A B2) beside them; with ACT and no GLU, h = act(A B). ALIGN divides every width and stride but
    those of adjacent elements, which in B are along the inner dimension where ALONG (see `divisor`).
    """
    inner, columns, plane = multiple(inner, ALIGN), multiple(columns, ALIGN), multiple(plane, ALIGN)
    a_row, b_expert, out_row = multiple(a_row, ALIGN), multiple(b_expert, ALIGN), multiple(out_row, ALIGN)
    if ALONG:
        b_n = multiple(b_n, ALIGN)
    else:
        b_k = multiple(b_k, ALIGN)
    if SDD:
        z = (tl.program_id(0) * BN) // BLOCK
        if z >= tl.load(row_offsets + block_rows):
            return
        m = tl.load(rows_Z + z)
        first = tl.load(row_offsets + m)
        wide = (tl.load(row_offsets + m + 1) - first) * BLOCK // BN
        column = tl.program_id(0) - first * BLOCK // BN
    else:
        wide = tl.cdiv(columns, BN)
        m = tl.program_id(0) // wide
        column = tl.program_id(0) - m * wide
        if tl.load(sizes + m) == 0:
            return
    local = tl.load(locals_ + m)
    row, column = swizzle(local * wide + column, tl.load(heights + m), wide, GROUP)
    m += row - local
    e = tl.load(experts + m)
    size, start = tl.load(sizes + m), tl.load(starts + m).to(tl.int64)
    if not UNIFORM:
        width = load_multiple(widths_E + e, ALIGN)
    if SDD:
        if not UNIFORM:
            columns = width
        if column * BN >= columns:  # of an expert's last block, where BN is less: nothing to load, nor to store
            return
    elif not UNIFORM:
        inner = width
    i, j, k = tl.arange(0, BLOCK), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    keep_i, keep_j = i < size, j < columns
    within_j = None if EVEN_N else keep_j
    # a row past the block's end is read as its last one, and never stored
    i_read = tl.minimum(i, size - 1)
    if SDD and STACKED:
        base = e.to(tl.int64) * b_expert
    elif SDD:
        base = load_multiple(columns_E + e, ALIGN).to(tl.int64) * b_n
    elif STACKED:
        base = e.to(tl.int64) * b_expert
    else:
        base = load_multiple(columns_E + e, ALIGN).to(tl.int64) * b_k
    if CHOICES > 0:
        a_at = (tl.load(source_ptr + start + i_read) // CHOICES).to(tl.int64)[:, None] * a_row
    elif SDD or UNIFORM:
        a_at = (start + i_read)[:, None] * a_row
    else:
        a_at = load_multiple(values + m, ALIGN) + i_read.to(tl.int64)[:, None] * inner
    a_at += k[None, :] * a_k
    b_at = base + k.to(tl.int64)[:, None] * b_k + j.to(tl.int64)[None, :] * b_n
    acc = tl.zeros((BLOCK, BN), tl.float32)
    if GLU:
        acc2 = tl.zeros((BLOCK, BN), tl.float32)
    for p in tl.static_range(PLANES):
        a, b = (a_ptr if p == 0 else a2_ptr) + a_at, (b_ptr if p == 0 else b2_ptr) + b_at
        if GLU:
            b2 = b2_ptr + b_at
        for step in range(0, inner, BK):
            within_k = None if EVEN_K else step + k < inner
            a_tile = load_within(a, None, within_k)
            acc = tl.dot(a_tile, load_within(b, within_k, within_j), acc, input_precision=PRECISION)
            if GLU:
                acc2 = tl.dot(a_tile, load_within(b2, within_k, within_j), acc2, input_precision=PRECISION)
                b2 += BK * b_k
            a += BK * a_k
            b += BK * b_k
    if SDD and not UNIFORM:
        out_at = load_multiple(values + m, ALIGN) + i.to(tl.int64)[:, None] * columns + j[None, :]
    else:
        out_at = (start + i)[:, None] * out_row + j[None, :]
    dtype = out_ptr.dtype.element_ty
    keep = keep_i[:, None] & keep_j[None, :]
    tl.store(out_ptr + out_at, acc.to(dtype), mask=keep)
    if GLU:
        tl.store(h_ptr + out_at, (activate(acc, ACT) * acc2).to(dtype), mask=keep)
        tl.store(out_ptr + plane + out_at, acc2.to(dtype), mask=keep)
    elif ACT is not None:
        tl.store(h_ptr + out_at, activate(acc, ACT).to(dtype), mask=keep)


@triton.jit
def inner_kernel(
    s_ptr, b_ptr, out_ptr,
    starts, sizes, values, column_rows, column_heights, order_E, widths_E, columns_E,
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
    blocks = tl.load(column_heights + n)
    i, j, k = column * BLOCK + tl.arange(0, BLOCK), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    keep_i, keep_j = i < width, j < columns
    within_i = None if EVEN_M else keep_i  # one a line: Triton 3.3 has no tuple with None
    within_j = None if EVEN_N else keep_j
    acc = tl.zeros((BLOCK, BN), tl.float32)
    if blocks > 0:
        m = tl.load(column_rows + n)
        start = tl.load(starts + m).to(tl.int64)
        rows = (blocks - 1) * BLOCK + tl.load(sizes + m + blocks - 1)
        origin = start * width if UNIFORM else load_multiple(values + m, ALIGN)
        if TURNED:
            s = s_ptr + origin + k.to(tl.int64)[None, :] * width + i[:, None]
        else:
            s = s_ptr + origin + k.to(tl.int64)[:, None] * width + i[None, :]
        b = b_ptr + (start + k)[:, None] * b_row + j[None, :] * b_n
        whole = rows // BK * BK
        for _ in range(0, whole, BK):  # without a mask of rows: a tenth faster on Hopper
            acc = add_product(acc, s, b, None, within_i, within_j, TURNED, PRECISION)
            s += BK * width
            b += BK * b_row
        if whole < rows:
            acc = add_product(acc, s, b, whole + k < rows, within_i, within_j, TURNED, PRECISION)
    base = e.to(tl.int64) * out_expert if STACKED else load_multiple(columns_E + e, ALIGN).to(tl.int64) * out_column
    out = out_ptr + base + i.to(tl.int64)[:, None] * out_column + j.to(tl.int64)[None, :] * out_n
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=keep_i[:, None] & keep_j[None, :])
