"""Products with a ragged inner dimension, warp-specialised: C_e = A_e^T B_e. See `hopper_products`.

Shapes: E experts, Y planes (gate, up); BM x BN x BK a tile.
"""

from __future__ import annotations

from foundry_moe_kernels.hopper_tiles import (
    HEIGHT,
    WRAP,
    expect_parts,
    multiply_and_store,
    next_stage,
    rings,
    skip,
    store_buffers,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def _inner_place(tile, work, BK: gl.constexpr):
    """(expert, its first row, rows, steps, plane, m, n tile): expert after expert, `grouped` tiles of m at a time."""
    offsets_ptr, order_ptr, _, planes, m_tiles, n_tiles, grouped, _ = work
    # Tiles get shorter, so the programs that are first in all later rounds come last in the first round.
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
    steps = gl.maximum(gl.cdiv(size, BK), 1)  # without rows, one step over elements that the maps clip to zeros
    return expert, start, size, steps, plane, pm - plane * m_tiles, inner // height


@gluon.jit
def _inner_producer(
    a_desc, b_desc, ring, work,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    _, _, num_experts, planes, m_tiles, n_tiles, _, height = work
    SIDES: gl.constexpr = CONSUMERS - 1
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_experts * planes * m_tiles * n_tiles, gl.num_programs(0)):
        _, start, size, steps, plane, m, n = _inner_place(tile, work, BK)
        column = m * (CONSUMERS * HEIGHT)
        parts = gl.minimum(gl.cdiv(height - column, HEIGHT), CONSUMERS)
        for step in range(steps):
            y = start + size
            x = WRAP - size + step * BK
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            expect_parts(ready, a_desc, b_desc, parts, CONSUMERS)
            for part in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    a_desc, [plane, WRAP, y, x, column + part * HEIGHT], ready,
                    a_ring.index(stage * CONSUMERS + part), pred=part < parts,
                )  # fmt: skip
            for side in gl.static_range(SIDES):
                tma.async_copy_global_to_shared(
                    b_desc, [0, WRAP, y, x, n * BN + side * (BN // SIDES)], ready, b_ring.index(stage * SIDES + side)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _inner_consumer(
    c_desc, ring, work, buffers, PART: gl.constexpr, CONSUMERS: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    _, _, num_experts, planes, m_tiles, n_tiles, _, height = work
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_experts * planes * m_tiles * n_tiles, gl.num_programs(0)):
        expert, _, _, steps, plane, m, n = _inner_place(tile, work, BK)
        row = (m * CONSUMERS + PART) * HEIGHT
        place = (0, plane, expert, row)
        if row >= height:
            stage, phase = skip(ring, stage, phase, steps, STAGES)
        elif LAST == BN or n < n_tiles - 1:
            stage, phase = multiply_and_store(
                ring, stage, phase, steps, c_desc, place, n * BN, buffers, PART, CONSUMERS, True, False, False,
                BN, BK, STAGES, SPLIT, BN
            )  # fmt: skip
        else:
            stage, phase = multiply_and_store(
                ring, stage, phase, steps, c_desc, place, n * BN, buffers, PART, CONSUMERS, True, False, False,
                BN, BK, STAGES, SPLIT, LAST
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "planes", "m_tiles", "n_tiles", "grouped", "height"])
def inner_kernel(
    a_desc, b_desc, c_desc, offsets_ptr, order_ptr, num_experts, planes, m_tiles, n_tiles, grouped, height,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    BUFFERS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """offsets_ptr: int32 [E], the row after the last one of each expert; order_ptr: int32 [E], most rows first.

    height: rows of a result; a part past them is skipped. LAST: see `rows_kernel`.
    """
    ring = rings(a_desc, b_desc, STAGES, CONSUMERS, False)
    first = store_buffers(c_desc, BUFFERS)
    second = store_buffers(c_desc, BUFFERS)
    work = (offsets_ptr, order_ptr, num_experts, planes, m_tiles, n_tiles, grouped, height)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_inner_consumer, (c_desc, ring, work, first, 0, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_consumer, (c_desc, ring, work, second, 1, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_producer, (a_desc, b_desc, ring, work, CONSUMERS, BN, BK, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        third = store_buffers(c_desc, BUFFERS)
        gl.warp_specialize([
            (_inner_consumer, (c_desc, ring, work, first, 0, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_consumer, (c_desc, ring, work, second, 1, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_consumer, (c_desc, ring, work, third, 2, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_producer, (a_desc, b_desc, ring, work, CONSUMERS, BN, BK, STAGES)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
