"""Products with ragged rows on Hopper: C = A W_e for the rows of every expert e, in one persistent launch.

Four of the six products of a dMoE layer: the two of the forward pass and the two that carry gradients to activations,
with their epilogues. Operands travel by tensor maps; a tile's place comes from the block rows of a topology. Knows
nothing of autograd, and nothing of the order in which rows were permuted but for the combine weights.

Shapes: R rows, E experts, D, F widths, P planes (gate, up), M block rows, BM x BN x BK the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.activations import activate, activate_with_grad
from foundry_moe_kernels.descriptors import WRAP_COORDINATE, halves, ragged_index


@triton.jit
def _place(tile, column_tiles, num_blocks, GROUP: tl.constexpr):
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


@triton.jit
def _load(desc, plane, start, size, row, column, BM: tl.constexpr, WIDTH: tl.constexpr):
    y, x = ragged_index(start, size, row)
    return desc.load([plane, WRAP_COORDINATE, y, x, column]).reshape(BM, WIDTH)


@triton.jit
def _backward_chunk(
    dh, z_desc, dz_desc, h_desc, start, size, row, column, weight,
    ACT: tl.constexpr, GLU: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One chunk of columns of the activation's backward; returns its part of each row's dot(dy W2, h)."""
    gate = _load(z_desc, 0, start, size, row, column, BM, WIDTH).to(tl.float32)
    value, slope = activate_with_grad(gate, ACT)
    dtype: tl.constexpr = dz_desc.dtype
    weighted = dh * weight[:, None]
    if GLU:
        up = _load(z_desc, 1, start, size, row, column, BM, WIDTH).to(tl.float32)
        _store(dz_desc, (weighted * value).to(dtype), 1, start, size, row, column, BM, WIDTH)
        h = value * up
        dgate = weighted * up * slope
    else:
        h = value
        dgate = weighted * slope
    _store(dz_desc, dgate.to(dtype), 0, start, size, row, column, BM, WIDTH)
    _store(h_desc, (h * weight[:, None]).to(dtype), 0, start, size, row, column, BM, WIDTH)
    return tl.sum(dh * h, axis=1)


@triton.jit(do_not_specialize=["num_rows", "column_tiles", "k_tiles", "swapped"])
def ragged_rows_kernel(
    a_desc, b_desc, c_desc, z_desc, h_desc,
    block_rows_ptr, num_blocks_ptr, weights_ptr, source_ptr, dots_ptr,
    num_rows, column_tiles, k_tiles, swapped,
    PLANES: tl.constexpr,
    EPILOGUE: tl.constexpr,  # plain | up | down_backward
    ACT: tl.constexpr, GLU: tl.constexpr, WEIGHTED: tl.constexpr, TRANS_B: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """block_rows_ptr: int32 [M, 4] of (expert, first row of the expert, rows of the expert, row within it).

    plain          c[0] = A W, planes summed over (dx = dgate W1 + dup V1)
    up             z = pre-activations (gate and up planes; their columns side by side in the tile), h = act(gate) * up
    down_backward  A = dy, acc = dh: c = dz (may be z itself), h = weighted h, dots = partial dot(dh, h) [tiles, R]
    """
    dtype: tl.constexpr = a_desc.dtype
    num_blocks = tl.load(num_blocks_ptr)
    tiles = num_blocks * column_tiles
    COLUMNS: tl.constexpr = BN // 2 if EPILOGUE == "up" and GLU else BN
    done = tl.program_id(0) - PROGRAMS  # the epilogue's own tile count: no tie to the prologue of the next tile
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        block, column_tile = _place(tile, column_tiles, num_blocks, GROUP)
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
                b = b_desc.load([plane ^ swapped if EPILOGUE != "up" else 0, expert, column, k]).reshape(BN, BK).T
            else:
                b = b_desc.load([plane ^ swapped, expert, k, column]).reshape(BK, BN)
            acc = tl.dot(a, b, acc)

        done += PROGRAMS
        block, column_tile = _place(done, column_tiles, num_blocks, GROUP)
        entry = block_rows_ptr + block * 4
        start, size, row = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        column = column_tile * COLUMNS
        if EPILOGUE == "plain":
            if SPLIT == 1:
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
        elif EPILOGUE == "up":
            if GLU:
                first, second = halves(acc, BM, BN)
                gate, up = first.to(dtype), second.to(dtype)
                if swapped:
                    gate, up = up, gate
                _store(z_desc, gate, 0, start, size, row, column, BM, BN // 2)
                _store(z_desc, up, 1, start, size, row, column, BM, BN // 2)
                h = activate(gate.to(tl.float32), ACT) * up.to(tl.float32)
                _store(h_desc, h.to(dtype), 0, start, size, row, column, BM, BN // 2)
            else:
                left, right = halves(acc, BM, BN)
                z = left.to(dtype)
                _store(z_desc, z, 0, start, size, row, column, BM, BN // 2)
                _store(h_desc, activate(z.to(tl.float32), ACT).to(dtype), 0, start, size, row, column, BM, BN // 2)
                z = right.to(dtype)
                column += BN // 2
                _store(z_desc, z, 0, start, size, row, column, BM, BN // 2)
                _store(h_desc, activate(z.to(tl.float32), ACT).to(dtype), 0, start, size, row, column, BM, BN // 2)
        else:
            tl.static_assert(EPILOGUE == "down_backward")
            index = row + tl.arange(0, BM)
            inside = index < size
            if WEIGHTED:
                source = tl.load(source_ptr + start + index, mask=inside, other=0)
                weight = tl.load(weights_ptr + source, mask=inside, other=0.0).to(tl.float32)
            else:
                weight = tl.full((BM,), 1.0, tl.float32)
            left, right = halves(acc, BM, BN)
            H: tl.constexpr = BN // 2
            if SPLIT == 2:
                dots = _backward_chunk(left, z_desc, c_desc, h_desc, start, size, row, column, weight, ACT, GLU, BM, H)
                dots += _backward_chunk(
                    right, z_desc, c_desc, h_desc, start, size, row, column + H, weight, ACT, GLU, BM, H
                )
            else:
                l0, l1 = halves(left, BM, H)
                r0, r1 = halves(right, BM, H)
                W: tl.constexpr = BN // 4
                dots = _backward_chunk(l0, z_desc, c_desc, h_desc, start, size, row, column, weight, ACT, GLU, BM, W)
                dots += _backward_chunk(
                    l1, z_desc, c_desc, h_desc, start, size, row, column + W, weight, ACT, GLU, BM, W
                )
                dots += _backward_chunk(
                    r0, z_desc, c_desc, h_desc, start, size, row, column + 2 * W, weight, ACT, GLU, BM, W
                )
                dots += _backward_chunk(
                    r1, z_desc, c_desc, h_desc, start, size, row, column + 3 * W, weight, ACT, GLU, BM, W
                )
            if WEIGHTED:
                tl.store(dots_ptr + column_tile.to(tl.int64) * num_rows + start + index, dots, mask=inside)
