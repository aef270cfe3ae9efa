"""The expert products as warp-specialised kernels, in Gluon, Triton's lower-level dialect (Triton 3.6, Hopper).

Ragged rows: C = A W_e for the rows of every expert e, with a GLU's activation in the first product's epilogue; a tile's
place comes from the block rows of a topology. Ragged inner dimension (`hopper_inner`): C_e = A_e^T B_e over the rows of
every expert e, zeros for one without rows. A program is persistent and has groups of warps:

    producer      one warp: fills a ring of shared-memory stages by TMA, ahead of the current tile. Four warps where the
                  rows of an operand are gathered from tokens: TMA cannot, so each thread copies 16 bytes (cp.async)
    consumers     two or three groups of four warps, each with 64 of a tile's rows: asynchronous products of a stage,
                  then its part of the epilogue through buffers of its own, stored while the next tile is multiplied
    copier        one warp, if requested: copies tokens to their rows for a later product, in place of a launch

The groups share only the barriers of the ring, two a stage: `full` (the bytes have arrived) and `empty` (all consumers
are done), and, in products of rows, those of the tile queue. Experts end in partial tiles, which take less time:
tiles are scheduled dynamically, by a counter in device memory that all producers draw from, and a producer passes each
tile's number to its consumers by a queue in shared memory.

Shapes: R rows, E experts, Y planes (gate, up), M block rows; BM x BN x BK the tile.
"""

from __future__ import annotations

from foundry_moe_kernels.hopper_tiles import (
    GATHERERS,
    HEIGHT,
    WRAP,
    expect_parts,
    multiply,
    multiply_and_store,
    next_stage,
    reshaped,
    rings,
    skip,
    store_buffers,
    store_gated,
)
from foundry_moe_kernels.tuning import Tile
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

QUEUED = gl.constexpr(2)  # tiles that a producer may be ahead, two or more
WARPS = 4  # of the first consumer; the others have as many
SHARED_BYTES = 226 * 2**10  # of a multiprocessor, less what barriers take
REGISTERS = {128: 168, 192: 128}  # of a thread at launch, by rows: all but the consumers give up most of them
_COPY_BYTES = 2**15  # of the rows in flight


@gluon.jit
def _tile_queue(CONSUMERS: gl.constexpr):
    """Tile numbers from the producer to its consumers: a ring of slots and their barriers."""
    numbers = gl.allocate_shared_memory(gl.int32, [QUEUED, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [QUEUED, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [QUEUED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUEUED):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    return numbers, full, empty


@gluon.jit
def _push_tile(queue, turn, tile, W: gl.constexpr):
    """Called by the producer, of W warps."""
    numbers, full, empty = queue
    slot = turn % QUEUED
    mbarrier.wait(empty.index(slot), ((turn // QUEUED) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    numbers.index(slot).store(gl.full([1], tile, gl.int32, layout))
    mbarrier.arrive(full.index(slot))


@gluon.jit
def _pop_tile(queue, turn):
    """Called by a consumer."""
    numbers, full, empty = queue
    slot = turn % QUEUED
    mbarrier.wait(full.index(slot), (turn // QUEUED) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.max(numbers.index(slot).load(layout), 0)
    mbarrier.arrive(empty.index(slot))
    return tile


@gluon.jit
def _rows_place(tile, column_tiles, num_blocks, grouped):
    """(block row, column tile) of a tile id: `grouped` block rows at a time, so that L2 keeps both operands."""
    group = tile // (grouped * column_tiles)
    first = group * grouped
    height = min(num_blocks - first, grouped)
    inner = tile - group * (grouped * column_tiles)
    return first + inner % height, inner // height


@gluon.jit
def _rows_producer(
    a_desc, b_desc, low, ring, work, queue, tokens,
    PLANES: gl.constexpr, GATED: gl.constexpr, TRANS_B: gl.constexpr, COLUMNS: gl.constexpr,
    CHOICES: gl.constexpr, GATHERED: gl.constexpr, LOW: gl.constexpr, CONSUMERS: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    a_ring, b_ring, full, empty = ring
    block_rows_ptr, counts_ptr, column_tiles, k_tiles, swapped, grouped, low_tiles = work
    low_a_desc, low_b_desc = low
    num_blocks = gl.load(counts_ptr)
    tiles = num_blocks * column_tiles
    SIDES: gl.constexpr = CONSUMERS - 1
    TOGETHER: gl.constexpr = GATED and SIDES == 1  # gate and up are one box
    SIDE: gl.constexpr = b_desc.block_type.shape[2] if TRANS_B else b_desc.block_type.shape[3]
    if GATHERED:
        x_ptr, x_stride, source_ptr, num_rows = tokens
        # 128 bytes of a row side by side: a stage's swizzle spreads them over all banks
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [GATHERERS, 1], [1, 0])
        rows = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        columns = gl.arange(0, BK, gl.SliceLayout(0, layout))
    WARPS_HERE: gl.constexpr = GATHERERS if GATHERED else 1
    stage = 0
    phase = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        _push_tile(queue, turn, tile, WARPS_HERE)
        turn += 1
        block, column_tile = _rows_place(tile, column_tiles, num_blocks, grouped)
        tile = gl.num_programs(0) + gl.atomic_add(counts_ptr + 1, 1, sem="relaxed")
        entry = block_rows_ptr + block * 4
        expert = gl.load(entry)
        row = gl.load(entry + 3)
        first_row = gl.load(entry + 1) + row
        parts = gl.minimum(gl.cdiv(gl.load(entry + 2) - row, HEIGHT), CONSUMERS)
        column = column_tile * COLUMNS
        if GATHERED:
            pointers = ()
            for part in gl.static_range(CONSUMERS):
                index = first_row + part * HEIGHT + rows
                source = gl.load(source_ptr + index, mask=index < num_rows, other=0)
                token = gl.maximum(source, 0) // CHOICES  # rows past the end read any token
                of_part = x_ptr + token.to(gl.int64)[:, None] * x_stride + columns[None, :]
                pointers = pointers + (of_part,)  # type: ignore[assignment]  # noqa: RUF005
        for step in range(k_tiles * PLANES):
            plane = step // k_tiles
            k = (step - plane * k_tiles) * BK
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            if GATHERED:
                mbarrier.expect(ready, SIDES * b_desc.block_type.nbytes)
            else:
                expect_parts(ready, a_desc, b_desc, parts, CONSUMERS)
                for part in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(
                        a_desc, [plane, first_row + part * HEIGHT, k], ready, a_ring.index(stage * CONSUMERS + part),
                        pred=part < parts,
                    )  # fmt: skip
            for side in gl.static_range(SIDES):
                b_plane = 0 if TOGETHER else (side if GATED else plane) ^ swapped
                n = column if GATED else column + side * SIDE
                place = [b_plane, expert, n, k] if TRANS_B else [b_plane, expert, k, n]
                tma.async_copy_global_to_shared(b_desc, place, ready, b_ring.index(stage * SIDES + side))
            if GATHERED:
                for part in gl.static_range(CONSUMERS):
                    async_copy.async_copy_global_to_shared(
                        a_ring.index(stage * CONSUMERS + part).reshape([HEIGHT, BK]), pointers[part] + step * BK
                    )
                async_copy.mbarrier_arrive(ready, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)
        if LOW:
            for step in range(low_tiles):
                k = step * low_a_desc.block_type.shape[2]
                mbarrier.wait(empty.index(stage), phase ^ 1)
                ready = full.index(stage)
                expect_parts(ready, low_a_desc, low_b_desc, parts, CONSUMERS)
                for part in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(
                        low_a_desc, [0, first_row + part * HEIGHT, k], ready,
                        reshaped(a_ring.index(stage * CONSUMERS + part), low_a_desc), pred=part < parts,
                    )  # fmt: skip
                for side in gl.static_range(SIDES):
                    low_plane = side if GATED else 0
                    n = column if GATED else column + side * SIDE
                    place = [low_plane, expert, n, k] if TRANS_B else [low_plane, expert, k, n]
                    low_b = reshaped(b_ring.index(stage * SIDES + side), low_b_desc)
                    tma.async_copy_global_to_shared(low_b_desc, place, ready, low_b)
                if GATHERED:
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                stage, phase = next_stage(stage, phase, STAGES)
    _push_tile(queue, turn, tile, WARPS_HERE)
    if gl.atomic_add(counts_ptr + 2, 1) == gl.num_programs(0) - 1:  # the last program resets both for the next launch
        gl.store(counts_ptr + 1, 0)
        gl.store(counts_ptr + 2, 0)


@gluon.jit
def _rows_consumer(
    c_desc, h_desc, low, ring, work, queue, buffers, PART: gl.constexpr, LOW: gl.constexpr,
    PLANES: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, TRANS_B: gl.constexpr,
    GATHERED: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    block_rows_ptr, counts_ptr, column_tiles, k_tiles, swapped, grouped, low_tiles = work
    num_blocks = gl.load(counts_ptr)
    tiles = num_blocks * column_tiles
    COLUMNS: gl.constexpr = BN // 2 if GATED else BN
    more = (low[0], low[1], low_tiles)
    stage = 0
    phase = 0
    turn = 0
    tile = _pop_tile(queue, turn)
    while tile < tiles:
        block, column_tile = _rows_place(tile, column_tiles, num_blocks, grouped)
        entry = block_rows_ptr + block * 4
        start = gl.load(entry + 1)
        size = gl.load(entry + 2)
        row = gl.load(entry + 3) + PART * HEIGHT
        steps = k_tiles * PLANES
        place = (0, WRAP, start + size, WRAP - size + row)
        column = column_tile * COLUMNS
        if row >= size:
            stage, phase = skip(ring, stage, phase, steps + low_tiles, STAGES)
        elif GATED:
            gate, up, stage, phase = multiply(
                ring, stage, phase, steps, PART, CONSUMERS, False, TRANS_B, GATHERED, BN, BK, STAGES, BN, more, LOW
            )
            store_gated(gate, up, c_desc, h_desc, place, column, buffers, swapped, ACT, CONSUMERS, SPLIT)
        elif LAST == BN or column_tile < column_tiles - 1:
            stage, phase = multiply_and_store(
                ring, stage, phase, steps, c_desc, place, column, buffers, PART, CONSUMERS, False, TRANS_B,
                GATHERED, BN, BK, STAGES, SPLIT, BN, more, LOW
            )  # fmt: skip
        else:
            stage, phase = multiply_and_store(
                ring, stage, phase, steps, c_desc, place, column, buffers, PART, CONSUMERS, False, TRANS_B,
                GATHERED, BN, BK, STAGES, SPLIT, LAST, more, LOW
            )  # fmt: skip
        turn += 1
        tile = _pop_tile(queue, turn)
    tma.store_wait(0)


@gluon.jit
def _copy(in_desc, out_desc, source_ptr, end_ptr, slots, ready, CHOICES: gl.constexpr):
    """Copies this program's share of the rows through a ring of slots: LAG loads in flight, the others storing."""
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


@gluon.jit(do_not_specialize=["num_rows", "column_tiles", "k_tiles", "swapped", "grouped", "low_tiles"])
def rows_kernel(
    a_desc, b_desc, low_a_desc, low_b_desc, c_desc, h_desc, in_desc, out_desc,
    block_rows_ptr, counts_ptr, x_ptr, source_ptr, end_ptr,
    x_stride, num_rows, column_tiles, k_tiles, swapped, grouped, low_tiles,
    CHOICES: gl.constexpr, GATHERED: gl.constexpr, SLOTS: gl.constexpr, LOW: gl.constexpr,
    PLANES: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, TRANS_B: gl.constexpr,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    BUFFERS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """block_rows_ptr: int32 [M, 4], for M blocks of a tile's rows: expert, first row of the expert, rows of the expert,
    row within it.

    counts_ptr: int32 [3], block rows in use and two zeros, which a launch resets. Launches that share them must not
    overlap.

    plain     c[0] = A W, planes summed over
    GATED     c = gate and up, each half of the tile's columns; h = act(gate) * up
    GATHERED  row r of A is token source[r] // CHOICES of x (its width a multiple of BK); else A comes by a_desc
    LAST      columns to multiply of a row's last tile, unless GATED: see `last_columns`
    LOW       low_tiles more steps, of low_a [1, R, L] and low_b, laid out as B, are added: c = A W + low_a low_b. They
              are as deep as low_a's box, BK or less
    SLOTS     of the copier; 0 = none. Row r of out_desc becomes token source[r] // CHOICES of in_desc. Not GATHERED
    """
    ring = rings(a_desc, b_desc, STAGES, CONSUMERS, GATHERED)
    first = store_buffers(c_desc, BUFFERS)
    second = store_buffers(c_desc, BUFFERS)
    work = (block_rows_ptr, counts_ptr, column_tiles, k_tiles, swapped, grouped, low_tiles)
    low = (low_a_desc, low_b_desc)
    queue = _tile_queue(CONSUMERS)
    tokens = (x_ptr, x_stride, source_ptr, num_rows)
    COLUMNS: gl.constexpr = BN // 2 if GATED else BN
    if SLOTS:
        slots = store_buffers(in_desc, SLOTS)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        gl.warp_specialize([
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, first, 0, LOW, PLANES, GATED, ACT, TRANS_B,
                              False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, second, 1, LOW, PLANES, GATED, ACT, TRANS_B,
                              False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_producer, (a_desc, b_desc, low, ring, work, queue, tokens, PLANES, GATED, TRANS_B, COLUMNS, CHOICES,
                              False, LOW, CONSUMERS, BK, STAGES)),
            (_copy, (in_desc, out_desc, source_ptr, end_ptr, slots, ready, CHOICES)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    elif CONSUMERS == 3:
        gl.static_assert(not GATHERED)
        third = store_buffers(c_desc, BUFFERS)
        gl.warp_specialize([
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, first, 0, LOW, PLANES, GATED, ACT, TRANS_B,
                              False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, second, 1, LOW, PLANES, GATED, ACT, TRANS_B,
                              False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, third, 2, LOW, PLANES, GATED, ACT, TRANS_B,
                              False, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_producer, (a_desc, b_desc, low, ring, work, queue, tokens, PLANES, GATED, TRANS_B, COLUMNS, CHOICES,
                              False, LOW, CONSUMERS, BK, STAGES)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    else:
        LOADERS: gl.constexpr = GATHERERS if GATHERED else 1
        MOST: gl.constexpr = 232 if GATHERED else 240
        LEAST: gl.constexpr = 40 if GATHERED else 24
        gl.warp_specialize([
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, first, 0, LOW, PLANES, GATED, ACT, TRANS_B,
                              GATHERED, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_consumer, (c_desc, h_desc, low, ring, work, queue, second, 1, LOW, PLANES, GATED, ACT, TRANS_B,
                              GATHERED, CONSUMERS, BN, BK, STAGES, SPLIT, LAST)),
            (_rows_producer, (a_desc, b_desc, low, ring, work, queue, tokens, PLANES, GATED, TRANS_B, COLUMNS, CHOICES,
                              GATHERED, LOW, CONSUMERS, BK, STAGES)),
        ], [4, LOADERS], [MOST, LEAST])  # fmt: skip


def buffers(tile: Tile, split: int, itemsize: int = 2) -> int:
    """How many of its `split` parts each consumer may store at a time: two if they fit beside the ring."""
    ring_bytes = 2 * tile.stages * (tile.bm + tile.bn) * tile.bk
    part_bytes = itemsize * tile.bm * tile.bn // split  # of all consumers
    return max(min((SHARED_BYTES - ring_bytes) // part_bytes, split, 2), 1)


def last_columns(columns: int, bn: int) -> int:
    """Columns to multiply in a matrix's last tile: 64 or 128 where these cover all remaining columns, else `bn`."""
    left = columns % bn
    return next((wide for wide in (64, 128) if 0 < left <= wide < bn), bn)


def copy_slots(width: int) -> int:
    """Rows of 16-bit floats that a copier has in flight."""
    return min(8, _COPY_BYTES // (2 * width))


def copying(tile: Tile) -> Tile:
    """The tile with room for a copier."""
    part_bytes = 2 * tile.bm * tile.bn // 2
    stages = (SHARED_BYTES - _COPY_BYTES - part_bytes) // (2 * (tile.bm + tile.bn) * tile.bk)
    return tile._replace(stages=min(tile.stages, stages), split=max(tile.split, 2))
