"""Parts of the warp-specialised kernels of `hopper_products` and `hopper_inner`: the ring and a consumer's work.

A tile has 128 or 192 rows and 256 columns. Each of its two or three consumers has a part, of HEIGHT rows. Two multiply
by 256 columns at once. Three have too few registers for that instruction, and multiply by each side of 128 in turn.
Products wait for L2, from which the higher tile loads 0.78 of the bytes for an operation. Its longer epilogue costs
more where the inner dimension is short.

Shapes: BM x BN x BK a tile.
"""

from __future__ import annotations

from foundry_moe_kernels import tuning
from foundry_moe_kernels.activations import activate
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WRAP = gl.constexpr(2**28)  # see `descriptors`
GATHERERS = gl.constexpr(4)  # warps of a producer that gathers
HEIGHT = gl.constexpr(tuning.HEIGHT)  # rows of a consumer


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """Computed, since `last = stage` in a loop keeps what `last` was before the loop (Triton 3.6)."""
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def _b_matrix(box, K: gl.constexpr, SIDE: gl.constexpr, N: gl.constexpr, TRANS_B: gl.constexpr):
    """The first N columns of a side of B, [K, N]."""
    if TRANS_B:
        return box.reshape([SIDE, K]).slice(0, N, dim=0).permute((1, 0))
    else:
        return box.reshape([K, SIDE]).slice(0, N, dim=1)


@gluon.jit
def _accumulate(
    a, b_left, b_right, left, right, use_acc,
    K: gl.constexpr, SIDE: gl.constexpr, TRANS_B: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """One stage's product of each side; the products of the stage before are done."""
    N: gl.constexpr = left.shape[1]
    left = warpgroup_mma(a, _b_matrix(b_left, K, SIDE, N, TRANS_B), left, use_acc=use_acc, is_async=True)
    if BOTH:
        right = warpgroup_mma(a, _b_matrix(b_right, K, SIDE, N, TRANS_B), right, use_acc=use_acc, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=[left, right])
    else:
        left = warpgroup_mma_wait(1, deps=[left])
    return left, right


@gluon.jit
def multiply(
    ring, stage, phase, steps,
    PART: gl.constexpr, CONSUMERS: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, GATHERED: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
    low=None, LOW: gl.constexpr = False,
):  # fmt: skip
    """The first WIDE columns of one part [HEIGHT, BN] of a tile, fp32, by sides. The second may be unused.

    A step's stage is released once the next step's product has been issued. LOW: with steps that are less deep, whose
    boxes lie at the beginning of a stage's boxes in layouts of their own.
    """
    a_ring, b_ring, full, empty = ring
    SIDES: gl.constexpr = CONSUMERS - 1
    SIDE: gl.constexpr = BN // SIDES
    N: gl.constexpr = min(WIDE, SIDE)
    BOTH: gl.constexpr = WIDE > SIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    left = gl.zeros([HEIGHT, N], gl.float32, layout)
    right = gl.zeros([HEIGHT, N], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()  # orders cp.async writes of threads before wgmma reads
        a = a_ring.index(stage * CONSUMERS + PART)
        a = a.reshape([BK, HEIGHT]).permute((1, 0)) if TRANS_A else a.reshape([HEIGHT, BK])
        b_left, b_right = b_ring.index(stage * SIDES), b_ring.index(stage * SIDES + SIDES - 1)
        left, right = _accumulate(a, b_left, b_right, left, right, step > 0, BK, SIDE, TRANS_B, BOTH)
        mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=step > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    if LOW:
        low_a, low_b, low_tiles = low
        K: gl.constexpr = low_a.block_type.shape[2]
        for _ in range(low_tiles):
            mbarrier.wait(full.index(stage), phase)
            a = reshaped(a_ring.index(stage * CONSUMERS + PART), low_a).reshape([HEIGHT, K])
            b_left = reshaped(b_ring.index(stage * SIDES), low_b)
            b_right = reshaped(b_ring.index(stage * SIDES + SIDES - 1), low_b)
            left, right = _accumulate(a, b_left, b_right, left, right, True, K, SIDE, TRANS_B, BOTH)
            mbarrier.arrive(empty.index(_before(stage, STAGES)))
            stage, phase = next_stage(stage, phase, STAGES)
    if BOTH:
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    else:
        left = warpgroup_mma_wait(0, deps=[left])
    mbarrier.arrive(empty.index(_before(stage, STAGES)))
    return left, right, stage, phase


@gluon.jit
def expect_parts(ready, a_desc, b_desc, parts, CONSUMERS: gl.constexpr, WITH_B: gl.constexpr = True):
    """Announces a stage's bytes: a box of A for each of the tile's parts that has rows, and one of B for each side."""
    b_bytes: gl.constexpr = (CONSUMERS - 1) * b_desc.block_type.nbytes if WITH_B else 0
    for count in gl.static_range(1, CONSUMERS + 1):
        mbarrier.expect(ready, count * a_desc.block_type.nbytes + b_bytes, pred=parts == count)


@gluon.jit
def reshaped(stage, desc):
    """A stage's memory as it holds a box of another map."""
    return stage._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def skip(ring, stage, phase, steps, STAGES: gl.constexpr):
    """Releases the stages of a part that has no rows."""
    _, _, full, empty = ring
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
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
def _write(left, right, desc, place, column, buffers, SPLIT: gl.constexpr):
    """A consumer's rows in SPLIT groups of columns, which take turns at the buffers."""
    COUNT: gl.constexpr = buffers.shape[0]
    W: gl.constexpr = 2 * left.shape[1] // SPLIT
    if SPLIT == 2:
        _put(left, desc, place, column, buffers.index(0), 0)
        _put(right, desc, place, column + W, buffers.index(1 % COUNT), COUNT - 1)
    else:
        l0, l1 = _halves(left)
        _put(l0, desc, place, column, buffers.index(0), 0)
        _put(l1, desc, place, column + W, buffers.index(1 % COUNT), COUNT - 1)
        r0, r1 = _halves(right)
        _put(r0, desc, place, column + 2 * W, buffers.index(2 % COUNT), COUNT - 1)
        _put(r1, desc, place, column + 3 * W, buffers.index(3 % COUNT), COUNT - 1)


@gluon.jit
def multiply_and_store(
    ring, stage, phase, steps, desc, place, column, buffers,
    PART: gl.constexpr, CONSUMERS: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, GATHERED: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    WIDE: gl.constexpr, low=None, LOW: gl.constexpr = False,
):  # fmt: skip
    """Multiplies and stores the first WIDE columns of a part: of the matrix's last one, those that are there."""
    left, right, stage, phase = multiply(
        ring, stage, phase, steps, PART, CONSUMERS, TRANS_A, TRANS_B, GATHERED, BN, BK, STAGES, WIDE, low, LOW
    )
    COLUMNS: gl.constexpr = BN // SPLIT
    if WIDE == COLUMNS:
        _put(left, desc, place, column, buffers.index(0), 0)
    elif WIDE == BN:
        if CONSUMERS == 2:
            left, right = _halves(left)
        _write(left, right, desc, place, column, buffers, SPLIT)
    elif WIDE > COLUMNS:
        left, right = _halves(left)
        _write(left, right, desc, place, column, buffers, 2)
    else:  # the rest of the buffer lies past the matrix's last column, where the map clips
        tma.store_wait(0)
        buffers.index(0).reshape([HEIGHT, COLUMNS]).slice(0, WIDE, dim=1).store(left.to(desc.dtype))
        fence_async_shared()
        c0, c1, c2, row = place
        tma.async_copy_shared_to_global(desc, [c0, c1, c2, row, column], buffers.index(0))
    return stage, phase


@gluon.jit
def _store_gated_columns(gate, up, z_desc, h_desc, place, column, buffers, ACT: gl.constexpr):
    COUNT: gl.constexpr = buffers.shape[0]
    gate, up = gate.to(z_desc.dtype), up.to(z_desc.dtype)
    _, c1, c2, row = place
    _put(gate, z_desc, (0, c1, c2, row), column, buffers.index(0), 0)
    _put(up, z_desc, (1, c1, c2, row), column, buffers.index(1 % COUNT), COUNT - 1)
    h = activate(gate.to(gl.float32), ACT) * up.to(gl.float32)
    _put(h, h_desc, (0, c1, c2, row), column, buffers.index(2 % COUNT), COUNT - 1)


@gluon.jit
def store_gated(
    gate, up, z_desc, h_desc, place, column, buffers, swapped,
    ACT: gl.constexpr, CONSUMERS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Gate and up, and act(gate) * up: a side's columns at once, or in halves."""
    if CONSUMERS == 2:  # one side, of both as they lie in memory
        gate, up = _halves(gate)
        gate, up = gate.to(z_desc.dtype), up.to(z_desc.dtype)
        if swapped:
            gate, up = up, gate
    if SPLIT == 2:
        _store_gated_columns(gate, up, z_desc, h_desc, place, column, buffers, ACT)
    else:
        g0, g1 = _halves(gate)
        u0, u1 = _halves(up)
        _store_gated_columns(g0, u0, z_desc, h_desc, place, column, buffers, ACT)
        _store_gated_columns(g1, u1, z_desc, h_desc, place, column + gate.shape[1] // 2, buffers, ACT)


@gluon.jit
def rings(a_desc, b_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GATHERED: gl.constexpr):
    """A stage has a box of A for each consumer and one of B for each side of the tile."""
    a_boxes: gl.constexpr = STAGES * CONSUMERS
    b_boxes: gl.constexpr = STAGES * (CONSUMERS - 1)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [a_boxes] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [b_boxes] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * GATHERERS if GATHERED else 1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    return a_ring, b_ring, full, empty


@gluon.jit
def store_buffers(desc, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005
