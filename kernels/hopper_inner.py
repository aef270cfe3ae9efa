"""Products with a ragged inner dimension, warp-specialised: C_e = A_e^T B_e. See `hopper_products`.

Shapes: E experts, Y planes (gate, up); BM x BN x BK a tile.
"""

from __future__ import annotations

from foundry_moe_kernels.hopper_tiles import (
    GATHERERS,
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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
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
    a_desc, b_desc, ring, work, tokens,
    CHOICES: gl.constexpr, GATHERED: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    _, _, num_experts, planes, m_tiles, n_tiles, _, height = work
    SIDES: gl.constexpr = CONSUMERS - 1
    SIDE: gl.constexpr = BN // SIDES
    WIDTH: gl.constexpr = HEIGHT if GATHERED == "a" else SIDE
    if GATHERED != "":
        x_ptr, x_stride, source_ptr = tokens
        # 128 bytes of a row side by side: a stage's swizzle spreads them over all banks
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [GATHERERS, 1], [1, 0])
        rows = gl.arange(0, BK, gl.SliceLayout(1, layout))
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_experts * planes * m_tiles * n_tiles, gl.num_programs(0)):
        _, start, size, steps, plane, m, n = _inner_place(tile, work, BK)
        column = m * (CONSUMERS * HEIGHT)
        parts = gl.minimum(gl.cdiv(height - column, HEIGHT), CONSUMERS)
        if GATHERED != "":
            first = x_ptr + (column if GATHERED == "a" else n * BN)
            source = gl.load(source_ptr + start + rows, mask=rows < size, other=0)
        for step in range(steps):
            y = start + size
            x = WRAP - size + step * BK
            if GATHERED != "":
                pointers = first + (source // CHOICES).to(gl.int64)[:, None] * x_stride + columns[None, :]
                inside = (step * BK + rows < size)[:, None]  # other rows become zeros
                following = (step + 1) * BK + rows
                source = gl.load(source_ptr + start + following, mask=following < size, other=0)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            if GATHERED == "a":
                mbarrier.expect(ready, SIDES * b_desc.block_type.nbytes)
            elif GATHERED == "b":
                expect_parts(ready, a_desc, b_desc, parts, CONSUMERS, False)
            else:
                expect_parts(ready, a_desc, b_desc, parts, CONSUMERS)
            if GATHERED != "a":
                for part in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(
                        a_desc, [plane, WRAP, y, x, column + part * HEIGHT], ready,
                        a_ring.index(stage * CONSUMERS + part), pred=part < parts,
                    )  # fmt: skip
            if GATHERED != "b":
                for side in gl.static_range(SIDES):
                    tma.async_copy_global_to_shared(
                        b_desc, [0, WRAP, y, x, n * BN + side * SIDE], ready, b_ring.index(stage * SIDES + side)
                    )
            if GATHERED != "":
                for part in gl.static_range(CONSUMERS if GATHERED == "a" else SIDES):
                    box = (
                        a_ring.index(stage * CONSUMERS + part)
                        if GATHERED == "a"
                        else b_ring.index(stage * SIDES + part)
                    )
                    async_copy.async_copy_global_to_shared(
                        box.reshape([BK, WIDTH]), pointers + part * WIDTH, mask=inside
                    )
                async_copy.mbarrier_arrive(ready, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _inner_consumer(
    c_desc, ring, work, buffers, PART: gl.constexpr, GATHERED: gl.constexpr, CONSUMERS: gl.constexpr,
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
                ring, stage, phase, steps, c_desc, place, n * BN, buffers, PART, CONSUMERS, True, False, GATHERED,
                BN, BK, STAGES, SPLIT, BN
            )  # fmt: skip
        else:
            stage, phase = multiply_and_store(
                ring, stage, phase, steps, c_desc, place, n * BN, buffers, PART, CONSUMERS, True, False, GATHERED,
                BN, BK, STAGES, SPLIT, LAST
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "planes", "m_tiles", "n_tiles", "grouped", "height"])
def inner_kernel(
    a_desc, b_desc, c_desc, offsets_ptr, order_ptr, x_ptr, source_ptr, x_stride,
    num_experts, planes, m_tiles, n_tiles, grouped, height,
    CHOICES: gl.constexpr, GATHERED: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, BUFFERS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """offsets_ptr: int32 [E], the row after the last one of each expert; order_ptr: int32 [E], most rows first.

    height: rows of a result; a part past them is skipped. LAST: see `rows_kernel`. GATHERED: "a" or "b", row r of this
    operand is token source[r] // CHOICES of x (its width a multiple of the tile's); "" = both come by their maps.
    """
    ring = rings(a_desc, b_desc, STAGES, CONSUMERS, GATHERED != "")
    first = store_buffers(c_desc, BUFFERS)
    second = store_buffers(c_desc, BUFFERS)
    work = (offsets_ptr, order_ptr, num_experts, planes, m_tiles, n_tiles, grouped, height)
    tokens = (x_ptr, x_stride, source_ptr)
    GATHERS: gl.constexpr = GATHERED != ""
    if CONSUMERS == 2:
        LOADERS: gl.constexpr = GATHERERS if GATHERS else 1
        MOST: gl.constexpr = 232 if GATHERS else 240
        LEAST: gl.constexpr = 40 if GATHERS else 24
        gl.warp_specialize([
            (_inner_consumer, (c_desc, ring, work, first, 0, GATHERS, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_consumer, (c_desc, ring, work, second, 1, GATHERS, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_producer, (a_desc, b_desc, ring, work, tokens, CHOICES, GATHERED, CONSUMERS, BN, BK, STAGES)),
        ], [4, LOADERS], [MOST, LEAST])  # fmt: skip
    else:
        gl.static_assert(GATHERED == "")
        third = store_buffers(c_desc, BUFFERS)
        gl.warp_specialize([
            (_inner_consumer, (c_desc, ring, work, first, 0, False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_consumer, (c_desc, ring, work, second, 1, False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_consumer, (c_desc, ring, work, third, 2, False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_inner_producer, (a_desc, b_desc, ring, work, tokens, CHOICES, GATHERED, CONSUMERS, BN, BK, STAGES)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
