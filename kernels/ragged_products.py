"""The six products of a dMoE layer on Hopper, in plain Triton with tensor maps (Triton 3.4 and later).

`hopper_products` and `hopper_inner` do the same in Gluon, with Triton 3.6. Ragged rows: C = A W_e for the rows of every
expert e, in one persistent launch; a GLU's activation is the first product's epilogue, and a tile's place comes from
the block rows of a topology. Ragged inner dimension, for weight gradients: C_e = A_e^T B_e over the rows of every
expert e; an expert without rows gets zeros.

Shapes: R rows, E experts, D, F widths, P planes (gate, up), M block rows, A columns m, B columns n, BM x BN x BK the
tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.activations import activate
from foundry_moe_kernels.descriptors import WRAP_COORDINATE, halves, ragged_index


@triton.jit
def _row_place(tile, column_tiles, num_blocks, GROUP: tl.constexpr):
    """(block row, column tile) of a tile id: GROUP block rows at a time, so that L2 keeps both operands."""
    group = tile // (GROUP * column_tiles)
    first = group * GROUP
    height = min(num_blocks - first, GROUP)
    inner = tile - group * (GROUP * column_tiles)
    return first + inner % height, inner // height


@triton.jit
def _store(desc, tile, plane, start, size, row, column, BM: tl.constexpr, WIDTH: tl.constexpr):
    y, x = ragged_index(start, size, row)
    desc.store([plane, WRAP_COORDINATE, y, x, column], tile.reshape(1, 1, 1, BM, WIDTH))


@triton.jit(do_not_specialize=["column_tiles", "k_tiles", "swapped", "low_tiles"])
def ragged_rows_kernel(
    a_desc, b_desc, low_a_desc, low_b_desc, c_desc, h_desc,
    block_rows_ptr, num_blocks_ptr, column_tiles, k_tiles, swapped, low_tiles,
    LOW: tl.constexpr, PLANES: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr, TRANS_B: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """block_rows_ptr: int32 [M, 4] of (expert, first row of the expert, rows of the expert, row within it).

    c[0] = A W, planes summed over (dx = dgate W1 + dup V1). With GLU c are the pre-activations, gate and up planes,
    whose columns lie side by side in the tile, and h = act(gate) * up. With LOW, low_tiles more steps are added, of
    low_a [1, R, L] and low_b, laid out as W: c = A W + low_a low_b.
    """
    dtype: tl.constexpr = a_desc.dtype
    num_blocks = tl.load(num_blocks_ptr)
    tiles = num_blocks * column_tiles
    COLUMNS: tl.constexpr = BN // 2 if GLU else BN
    done = tl.program_id(0) - PROGRAMS  # the epilogue's own tile count: no tie to the prologue of the next tile
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        block, column_tile = _row_place(tile, column_tiles, num_blocks, GROUP)
        entry = block_rows_ptr + block * 4
        expert = tl.load(entry)
        first_row = tl.load(entry + 1) + tl.load(entry + 3)
        column = column_tile * COLUMNS
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(k_tiles * PLANES):
            plane = step // k_tiles
            k = (step - plane * k_tiles) * BK
            a = a_desc.load([plane, first_row, k]).reshape(BM, BK)
            if TRANS_B:
                b = b_desc.load([0 if GLU else plane ^ swapped, expert, column, k]).reshape(BN, BK).T
            else:
                b = b_desc.load([plane ^ swapped, expert, k, column]).reshape(BK, BN)
            acc = tl.dot(a, b, acc)
        if LOW:
            for step in range(low_tiles):
                k = step * BK
                a = low_a_desc.load([0, first_row, k]).reshape(BM, BK)
                if TRANS_B:
                    b = low_b_desc.load([0, expert, column, k]).reshape(BN, BK).T
                else:
                    b = low_b_desc.load([0, expert, k, column]).reshape(BK, BN)
                acc = tl.dot(a, b, acc)

        done += PROGRAMS
        block, column_tile = _row_place(done, column_tiles, num_blocks, GROUP)
        entry = block_rows_ptr + block * 4
        start, size, row = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        column = column_tile * COLUMNS
        if GLU:
            first, second = halves(acc, BM, BN)
            gate, up = first.to(dtype), second.to(dtype)
            if swapped:
                gate, up = up, gate
            _store(c_desc, gate, 0, start, size, row, column, BM, BN // 2)
            _store(c_desc, up, 1, start, size, row, column, BM, BN // 2)
            h = activate(gate.to(tl.float32), ACT) * up.to(tl.float32)
            _store(h_desc, h.to(dtype), 0, start, size, row, column, BM, BN // 2)
        elif SPLIT == 1:
            _store(c_desc, acc.to(dtype), 0, start, size, row, column, BM, BN)
        else:
            left, right = halves(acc, BM, BN)
            if SPLIT == 2:
                _store(c_desc, left.to(dtype), 0, start, size, row, column, BM, BN // 2)
                _store(c_desc, right.to(dtype), 0, start, size, row, column + BN // 2, BM, BN // 2)
            else:
                l0, l1 = halves(left, BM, BN // 2)
                r0, r1 = halves(right, BM, BN // 2)
                Q: tl.constexpr = BN // 4
                _store(c_desc, l0.to(dtype), 0, start, size, row, column, BM, Q)
                _store(c_desc, l1.to(dtype), 0, start, size, row, column + Q, BM, Q)
                _store(c_desc, r0.to(dtype), 0, start, size, row, column + 2 * Q, BM, Q)
                _store(c_desc, r1.to(dtype), 0, start, size, row, column + 3 * Q, BM, Q)


@triton.jit
def _inner_place(tile, m_tiles, n_tiles, planes, GROUP: tl.constexpr):
    """(expert, plane, m tile, n tile): one expert after another, GROUP tiles of m at a time within it."""
    per_expert = planes * m_tiles * n_tiles
    expert = tile // per_expert
    inner = tile - expert * per_expert
    group = inner // (GROUP * n_tiles)
    first = group * GROUP
    height = min(planes * m_tiles - first, GROUP)
    inner -= group * (GROUP * n_tiles)
    pm = first + inner % height
    plane = pm // m_tiles
    return expert, plane, pm - plane * m_tiles, inner // height


@triton.jit
def _rows_of(offsets_ptr, expert):
    """(first row, rows) of an expert."""
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    return start, tl.load(offsets_ptr + expert) - start


@triton.jit(do_not_specialize=["num_experts", "planes", "m_tiles", "n_tiles"])
def ragged_inner_kernel(
    a_desc, b_desc, c_desc, offsets_ptr, order_ptr,
    num_experts, planes, m_tiles, n_tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """offsets_ptr: int32 [E], the row after the last one of each expert.

    order_ptr: int32 [E], the order of experts, most rows first: programs take tiles in turn, so each gets its share of
    the long ones.
    """
    dtype: tl.constexpr = c_desc.dtype
    tiles = num_experts * planes * m_tiles * n_tiles
    done = tl.program_id(0) - PROGRAMS
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        expert, plane, m, n = _inner_place(tile, m_tiles, n_tiles, planes, GROUP)
        expert = tl.load(order_ptr + expert)
        start, size = _rows_of(offsets_ptr, expert)
        steps = tl.maximum(tl.cdiv(size, BK), 1)  # without rows, one step over elements that the maps clip to zeros
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            y, x = ragged_index(start, size, step * BK)
            a = a_desc.load([plane, WRAP_COORDINATE, y, x, m * BM]).reshape(BK, BM)
            b = b_desc.load([0, WRAP_COORDINATE, y, x, n * BN]).reshape(BK, BN)
            acc = tl.dot(a.T, b, acc)
        done += PROGRAMS
        expert, plane, m, n = _inner_place(done, m_tiles, n_tiles, planes, GROUP)
        expert = tl.load(order_ptr + expert)
        row, column = m * BM, n * BN
        if SPLIT == 1:
            c_desc.store([plane, expert, row, column], acc.to(dtype).reshape(1, 1, BM, BN))
        else:
            left, right = halves(acc, BM, BN)
            H: tl.constexpr = BN // 2
            if SPLIT == 2:
                c_desc.store([plane, expert, row, column], left.to(dtype).reshape(1, 1, BM, H))
                c_desc.store([plane, expert, row, column + H], right.to(dtype).reshape(1, 1, BM, H))
            else:
                l0, l1 = halves(left, BM, H)
                r0, r1 = halves(right, BM, H)
                Q: tl.constexpr = BN // 4
                c_desc.store([plane, expert, row, column], l0.to(dtype).reshape(1, 1, BM, Q))
                c_desc.store([plane, expert, row, column + Q], l1.to(dtype).reshape(1, 1, BM, Q))
                c_desc.store([plane, expert, row, column + H], r0.to(dtype).reshape(1, 1, BM, Q))
                c_desc.store([plane, expert, row, column + H + Q], r1.to(dtype).reshape(1, 1, BM, Q))
