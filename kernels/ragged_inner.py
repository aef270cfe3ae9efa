"""Products with a ragged inner dimension on Hopper: C_e = A_e^T B_e over the rows of every expert e, in one launch.

The two of the six products of a dMoE layer that make weight gradients. An expert without rows gets zeros.

Shapes: R rows, E experts, P planes of A and of C (gate, up), A columns m, B columns n, BM x BN x BK the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.descriptors import WRAP_COORDINATE, halves, ragged_index


@triton.jit
def _place(tile, m_tiles, n_tiles, planes, GROUP: tl.constexpr):
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
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """offsets_ptr: int32 [E], the row after the last one of each expert.

    order_ptr: int32 [E], the order of experts, most rows first: programs take tiles in turn, so each gets its share of
    the long ones.
    """
    dtype: tl.constexpr = c_desc.dtype
    tiles = num_experts * planes * m_tiles * n_tiles
    done = tl.program_id(0) - PROGRAMS
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        expert, plane, m, n = _place(tile, m_tiles, n_tiles, planes, GROUP)
        expert = tl.load(order_ptr + expert)
        start, size = _rows_of(offsets_ptr, expert)
        steps = tl.maximum(tl.cdiv(size, BK), 1)  # without rows, one step over what the maps clip to zeros
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            y, x = ragged_index(start, size, step * BK)
            a = a_desc.load([plane, WRAP_COORDINATE, y, x, m * BM]).reshape(BK, BM)
            b = b_desc.load([0, WRAP_COORDINATE, y, x, n * BN]).reshape(BK, BN)
            acc = tl.dot(a.T, b, acc)
        done += PROGRAMS
        expert, plane, m, n = _place(done, m_tiles, n_tiles, planes, GROUP)
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
