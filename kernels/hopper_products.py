"""The expert products as warp-specialised kernels, in Gluon, Triton's lower-level dialect (Triton 3.6, Hopper).

They do what `ragged_rows` (plain, and `up` with a gate) and `ragged_inner` do, tile for tile. A program has three
groups of warps, or four:

    loader        one warp: fills a ring of shared-memory stages by tensor maps, on into the next tiles. Four warps
                  where an operand's rows are gathered from tokens: no tensor map can, threads copy 16 bytes each
    multipliers   two groups of four warps, each with its half of a tile's rows: an asynchronous product a stage, then
                  its half of the epilogue through buffers of its own, stored while the next tile multiplies
    copier        one warp, where asked for: copies tokens to their rows for a later product, in place of a launch

No barrier ties the groups but the ring's two a stage: `full` (its bytes have come) and `empty` (both halves are done).

Shapes: R rows, E experts, P planes (gate, up), M block rows; BM x BN x BK the tile, H = BM / 2 rows a multiplier.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from foundry_moe_kernels.activations import activate
from foundry_moe_kernels.tuning import Tile
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WRAP = gl.constexpr(2**28)  # see `descriptors`
WARPS = 4  # of the first multiplier; the second has as many
GATHERERS = gl.constexpr(4)  # warps of a loader that gathers
SHARED_BYTES = 226 * 2**10  # of a multiprocessor, less what barriers take
REGISTERS = 168  # a thread at launch, of which all but the multipliers give up most
COPY_COLUMNS = 256  # of a copied row's box; a box has at most so many in each of its dimensions
_COPY_BYTES = 2**15  # of the rows under way


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """Reckoned, since `last = stage` in a loop keeps what `last` was before the loop (Triton 3.6)."""
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def _multiply(
    ring, stage, phase, steps,
    HALF: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, GATHERED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half [H, BN] of a tile, fp32. A step's stage is given back once the step after it is under way."""
    a_ring, b_ring, full, empty = ring
    H: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    acc = gl.zeros([H, BN], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()  # for what threads have written, not the copy engine
        if TRANS_A:
            a = a_ring.index(stage).reshape([BK, BM]).slice(HALF * H, H, dim=1).permute((1, 0))
        else:
            a = a_ring.index(stage).reshape([BM, BK]).slice(HALF * H, H, dim=0)
        if TRANS_B:
            b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
        else:
            b = b_ring.index(stage).reshape([BK, BN])
        acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=step > 0)
        stage, phase = _next(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(stage, STAGES)))
    return acc, stage, phase


@gluon.jit
def _skip(ring, stage, phase, steps, STAGES: gl.constexpr):
    """A half without rows: its stages pass by."""
    _, _, full, empty = ring
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        stage, phase = _next(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _halves(tile):
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    return tile.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _put(tile, desc, place, column, buffer, PENDING: gl.constexpr):
    """Stores columns of a tile by way of `buffer`, free once all but the latest PENDING stores have read theirs."""
    tma.store_wait(PENDING)
    buffer.reshape(tile.shape).store(tile.to(desc.dtype))
    fence_async_shared()
    c0, c1, c2, row = place
    tma.async_copy_shared_to_global(desc, [c0, c1, c2, row, column], buffer)


@gluon.jit
def _write(acc, desc, place, column, buffers, SPLIT: gl.constexpr):
    """A half tile in SPLIT parts of columns, which take turns at the buffers. The last tile's stores are long done."""
    COUNT: gl.constexpr = buffers.shape[0]
    W: gl.constexpr = acc.shape[1] // SPLIT
    if SPLIT == 1:
        _put(acc, desc, place, column, buffers.index(0), 0)
    else:
        left, right = _halves(acc)
        if SPLIT == 2:
            _put(left, desc, place, column, buffers.index(0), 0)
            _put(right, desc, place, column + W, buffers.index(1 % COUNT), COUNT - 1)
        else:
            l0, l1 = _halves(left)
            r0, r1 = _halves(right)
            _put(l0, desc, place, column, buffers.index(0), 0)
            _put(l1, desc, place, column + W, buffers.index(1 % COUNT), COUNT - 1)
            _put(r0, desc, place, column + 2 * W, buffers.index(2 % COUNT), COUNT - 1)
            _put(r1, desc, place, column + 3 * W, buffers.index(3 % COUNT), COUNT - 1)


@gluon.jit
def _write_gated(acc, z_desc, h_desc, place, column, buffers, swapped, ACT: gl.constexpr):
    """Gate and up, side by side in the tile, and act(gate) * up."""
    COUNT: gl.constexpr = buffers.shape[0]
    first, second = _halves(acc)
    gate, up = first.to(z_desc.dtype), second.to(z_desc.dtype)
    if swapped:
        gate, up = up, gate
    _, c1, c2, row = place
    _put(gate, z_desc, (0, c1, c2, row), column, buffers.index(0), 0)
    _put(up, z_desc, (1, c1, c2, row), column, buffers.index(1 % COUNT), COUNT - 1)
    h = activate(gate.to(gl.float32), ACT) * up.to(gl.float32)
    _put(h, h_desc, (0, c1, c2, row), column, buffers.index(2 % COUNT), COUNT - 1)


@gluon.jit
def _rings(a_desc, b_desc, STAGES: gl.constexpr, GATHERED: gl.constexpr):
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * GATHERERS if GATHERED else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return a_ring, b_ring, full, empty


@gluon.jit
def _buffers(desc, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


# -- ragged rows: C = A W_e


@gluon.jit
def _rows_place(tile, column_tiles, num_blocks, grouped):
    """(block row, column tile) of a tile id: `grouped` block rows at a time, so that L2 keeps both operands."""
    group = tile // (grouped * column_tiles)
    first = group * grouped
    height = min(num_blocks - first, grouped)
    inner = tile - group * (grouped * column_tiles)
    return first + inner % height, inner // height


@gluon.jit
def _rows_load(
    a_desc, b_desc, ring, work, tokens,
    PLANES: gl.constexpr, GATED: gl.constexpr, TRANS_B: gl.constexpr, COLUMNS: gl.constexpr,
    CHOICES: gl.constexpr, GATHERED: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    block_rows_ptr, num_blocks_ptr, column_tiles, k_tiles, swapped, grouped = work
    num_blocks = gl.load(num_blocks_ptr)
    if GATHERED:
        x_ptr, x_stride, source_ptr, num_rows = tokens
        # 128 bytes of a row side by side: a stage's swizzle spreads them over all banks
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [GATHERERS, 1], [1, 0])
        rows = gl.arange(0, BM, gl.SliceLayout(1, layout))
        columns = gl.arange(0, BK, gl.SliceLayout(0, layout))
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_blocks * column_tiles, gl.num_programs(0)):
        block, column_tile = _rows_place(tile, column_tiles, num_blocks, grouped)
        entry = block_rows_ptr + block * 4
        expert = gl.load(entry)
        first_row = gl.load(entry + 1) + gl.load(entry + 3)
        column = column_tile * COLUMNS
        if GATHERED:
            index = first_row + rows
            source = gl.load(source_ptr + index, mask=index < num_rows, other=0)
            token = gl.maximum(source, 0) // CHOICES  # any token will do for a row of nobody
            pointers = x_ptr + token.to(gl.int64)[:, None] * x_stride + columns[None, :]
        for step in range(k_tiles * PLANES):
            plane = step // k_tiles
            k = (step - plane * k_tiles) * BK
            b_plane = 0 if GATED else plane ^ swapped
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            if GATHERED:
                mbarrier.expect(ready, b_desc.block_type.nbytes)
            else:
                mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(a_desc, [plane, first_row, k], ready, a_ring.index(stage))
            if TRANS_B:
                tma.async_copy_global_to_shared(b_desc, [b_plane, expert, column, k], ready, b_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(b_desc, [b_plane, expert, k, column], ready, b_ring.index(stage))
            if GATHERED:
                async_copy.async_copy_global_to_shared(a_ring.index(stage).reshape([BM, BK]), pointers + step * BK)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _rows_multiply(
    c_desc, h_desc, ring, work, buffers, HALF: gl.constexpr,
    PLANES: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, TRANS_B: gl.constexpr,
    GATHERED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    block_rows_ptr, num_blocks_ptr, column_tiles, k_tiles, swapped, grouped = work
    num_blocks = gl.load(num_blocks_ptr)
    COLUMNS: gl.constexpr = BN // 2 if GATED else BN
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_blocks * column_tiles, gl.num_programs(0)):
        block, column_tile = _rows_place(tile, column_tiles, num_blocks, grouped)
        entry = block_rows_ptr + block * 4
        start = gl.load(entry + 1)
        size = gl.load(entry + 2)
        row = gl.load(entry + 3) + HALF * (BM // 2)
        if row < size:
            acc, stage, phase = _multiply(
                ring, stage, phase, k_tiles * PLANES, HALF, False, TRANS_B, GATHERED, BM, BN, BK, STAGES
            )
            place = (0, WRAP, start + size, WRAP - size + row)
            column = column_tile * COLUMNS
            if GATED:
                _write_gated(acc, c_desc, h_desc, place, column, buffers, swapped, ACT)
            else:
                _write(acc, c_desc, place, column, buffers, SPLIT)
        else:
            stage, phase = _skip(ring, stage, phase, k_tiles * PLANES, STAGES)
    tma.store_wait(0)


@gluon.jit
def _copy(in_desc, out_desc, source_ptr, end_ptr, slots, ready, CHOICES: gl.constexpr):
    """This program's share of the rows, one after another: LAG of them on their way in, the others on theirs out."""
    SLOTS: gl.constexpr = slots.shape[0]
    LAG: gl.constexpr = SLOTS - 2
    end = gl.load(end_ptr)
    share = gl.cdiv(end, gl.num_programs(0))
    first = gl.program_id(0) * share
    count = gl.maximum(gl.minimum(end - first, share), 0)
    for i in range(count + LAG):
        if i >= LAG:
            j = i - LAG
            slot = j % SLOTS
            mbarrier.wait(ready.index(slot), (j // SLOTS) & 1)
            tma.async_copy_shared_to_global(out_desc, [first + j, 0, 0], slots.index(slot))
        if i < count:
            tma.store_wait(SLOTS - LAG)  # what was in the slot has left it
            slot = i % SLOTS
            token = gl.load(source_ptr + first + i) // CHOICES
            mbarrier.expect(ready.index(slot), in_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(in_desc, [token, 0, 0], ready.index(slot), slots.index(slot))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "column_tiles", "k_tiles", "swapped", "grouped"])
def rows_kernel(
    a_desc, b_desc, c_desc, h_desc, in_desc, out_desc, block_rows_ptr, num_blocks_ptr, x_ptr, source_ptr, end_ptr,
    x_stride, num_rows, column_tiles, k_tiles, swapped, grouped,
    CHOICES: gl.constexpr, GATHERED: gl.constexpr, SLOTS: gl.constexpr,
    PLANES: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, TRANS_B: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """block_rows_ptr: int32 [M, 4] of (expert, first row of the expert, rows of the expert, row within it).

    plain     c[0] = A W, planes summed over
    GATED     c = gate and up, whose columns lie side by side in the tile; h = act(gate) * up
    GATHERED  row r of A is token source[r] // CHOICES of x (its width a multiple of BK); else A comes by a_desc
    SLOTS     of the copier; 0 = none. Row r of out_desc becomes token source[r] // CHOICES of in_desc. Not GATHERED
    """
    ring = _rings(a_desc, b_desc, STAGES, GATHERED)
    first = _buffers(c_desc, BUFFERS)
    second = _buffers(c_desc, BUFFERS)
    work = (block_rows_ptr, num_blocks_ptr, column_tiles, k_tiles, swapped, grouped)
    tokens = (x_ptr, x_stride, source_ptr, num_rows)
    COLUMNS: gl.constexpr = BN // 2 if GATED else BN
    if SLOTS:
        slots = _buffers(in_desc, SLOTS)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        gl.warp_specialize([
            (_rows_multiply, (c_desc, h_desc, ring, work, first, 0, PLANES, GATED, ACT, TRANS_B, False,
                              BM, BN, BK, STAGES, SPLIT)),
            (_rows_multiply, (c_desc, h_desc, ring, work, second, 1, PLANES, GATED, ACT, TRANS_B, False,
                              BM, BN, BK, STAGES, SPLIT)),
            (_rows_load, (a_desc, b_desc, ring, work, tokens, PLANES, GATED, TRANS_B, COLUMNS, CHOICES, False,
                          BM, BK, STAGES)),
            (_copy, (in_desc, out_desc, source_ptr, end_ptr, slots, ready, CHOICES)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        LOADERS: gl.constexpr = GATHERERS if GATHERED else 1
        MOST: gl.constexpr = 232 if GATHERED else 240
        LEAST: gl.constexpr = 40 if GATHERED else 24
        gl.warp_specialize([
            (_rows_multiply, (c_desc, h_desc, ring, work, first, 0, PLANES, GATED, ACT, TRANS_B, GATHERED,
                              BM, BN, BK, STAGES, SPLIT)),
            (_rows_multiply, (c_desc, h_desc, ring, work, second, 1, PLANES, GATED, ACT, TRANS_B, GATHERED,
                              BM, BN, BK, STAGES, SPLIT)),
            (_rows_load, (a_desc, b_desc, ring, work, tokens, PLANES, GATED, TRANS_B, COLUMNS, CHOICES, GATHERED,
                          BM, BK, STAGES)),
        ], [4, LOADERS], [MOST, LEAST])  # fmt: skip


# -- ragged inner dimension: C_e = A_e^T B_e


@gluon.jit
def _inner_place(tile, work, BK: gl.constexpr):
    """(expert, its first row, rows, steps, plane, m, n tile): expert after expert, `grouped` tiles of m at a time."""
    offsets_ptr, order_ptr, _, planes, m_tiles, n_tiles, grouped = work
    # Tiles get shorter and programs take them in turn: whoever is ahead in every later turn comes last in the first.
    programs = gl.num_programs(0)
    tile = gl.where(tile < programs, programs - 1 - tile, tile)
    per_expert = planes * m_tiles * n_tiles
    turn = tile // per_expert
    inner = tile - turn * per_expert
    group = inner // (grouped * n_tiles)
    first = group * grouped
    height = min(planes * m_tiles - first, grouped)
    inner -= group * (grouped * n_tiles)
    pm = first + inner % height
    plane = pm // m_tiles
    expert = gl.load(order_ptr + turn)
    start = gl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    size = gl.load(offsets_ptr + expert) - start
    steps = gl.maximum(gl.cdiv(size, BK), 1)  # without rows, one step over what the maps clip to zeros
    return expert, start, size, steps, plane, pm - plane * m_tiles, inner // height


@gluon.jit
def _inner_load(
    a_desc, b_desc, ring, work,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    _, _, num_experts, planes, m_tiles, n_tiles, _ = work
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_experts * planes * m_tiles * n_tiles, gl.num_programs(0)):
        _, start, size, steps, plane, m, n = _inner_place(tile, work, BK)
        for step in range(steps):
            y = start + size
            x = WRAP - size + step * BK
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [plane, WRAP, y, x, m * BM], ready, a_ring.index(stage))
            tma.async_copy_global_to_shared(b_desc, [0, WRAP, y, x, n * BN], ready, b_ring.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _inner_multiply(
    c_desc, ring, work, buffers, HALF: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    _, _, num_experts, planes, m_tiles, n_tiles, _ = work
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_experts * planes * m_tiles * n_tiles, gl.num_programs(0)):
        expert, _, _, steps, plane, m, n = _inner_place(tile, work, BK)
        acc, stage, phase = _multiply(ring, stage, phase, steps, HALF, True, False, False, BM, BN, BK, STAGES)
        _write(acc, c_desc, (0, plane, expert, m * BM + HALF * (BM // 2)), n * BN, buffers, SPLIT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "planes", "m_tiles", "n_tiles", "grouped"])
def inner_kernel(
    a_desc, b_desc, c_desc, offsets_ptr, order_ptr, num_experts, planes, m_tiles, n_tiles, grouped,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """offsets_ptr: int32 [E], the row after the last one of each expert; order_ptr: int32 [E], most rows first."""
    ring = _rings(a_desc, b_desc, STAGES, False)
    first = _buffers(c_desc, BUFFERS)
    second = _buffers(c_desc, BUFFERS)
    work = (offsets_ptr, order_ptr, num_experts, planes, m_tiles, n_tiles, grouped)
    gl.warp_specialize([
        (_inner_multiply, (c_desc, ring, work, first, 0, BM, BN, BK, STAGES, SPLIT)),
        (_inner_multiply, (c_desc, ring, work, second, 1, BM, BN, BK, STAGES, SPLIT)),
        (_inner_load, (a_desc, b_desc, ring, work, BM, BN, BK, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


def buffers(tile: Tile, split: int) -> int:
    """How many of its `split` parts each half of a tile may have on the way out: two if they fit beside the ring."""
    ring_bytes = 2 * tile.stages * (tile.bm + tile.bn) * tile.bk
    part_bytes = 2 * tile.bm * tile.bn // split  # of both halves
    return max(min((SHARED_BYTES - ring_bytes) // part_bytes, split, 2), 1)


def copy_slots(width: int) -> int:
    """Rows of 16-bit floats that a copier has under way."""
    return min(8, _COPY_BYTES // (2 * width))


def copying(tile: Tile) -> Tile:
    """The tile with room for a copier."""
    part_bytes = 2 * tile.bm * tile.bn // 2
    stages = (SHARED_BYTES - _COPY_BYTES - part_bytes) // (2 * (tile.bm + tile.bn) * tile.bk)
    return dataclasses.replace(tile, stages=min(tile.stages, stages), split=max(tile.split, 2))


def row_descriptor(a_RD: Tensor) -> Any:
    """A tensor map whose box is a row, of a multiple of COPY_COLUMNS."""
    rows, width = a_RD.shape
    boxes = width // COPY_COLUMNS
    block = [1, boxes, COPY_COLUMNS]
    return TensorDescriptor(a_RD, [rows, *block[1:]], [a_RD.stride(0), COPY_COLUMNS, 1], block, _ROW_LAYOUT)


_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)


@functools.cache
def _layout(block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.float16)  # bf16 lies alike


def descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A tensor map for these kernels: it says how a box lies in shared memory."""
    return TensorDescriptor(base, shape, strides, block, _layout(tuple(block)))
