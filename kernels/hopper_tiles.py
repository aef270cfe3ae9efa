"""Parts of the warp-specialised kernels of `hopper_products` and `hopper_inner`: the ring and a half tile's work.

Shapes: BM x BN x BK a tile, H = BM / 2 rows of a consumer.
"""

from __future__ import annotations

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
def multiply(
    ring, stage, phase, steps,
    HALF: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, GATHERED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
    low=None, LOW: gl.constexpr = False,
):  # fmt: skip
    """The first WIDE columns of one half [H, BN] of a tile, fp32.

    A step's stage is released once the next step's product has been issued. LOW: with steps that are less deep, whose
    boxes lie at the beginning of a stage in a layout of their own.
    """
    a_ring, b_ring, full, empty = ring
    H: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    acc = gl.zeros([H, WIDE], gl.float32, layout)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()  # orders cp.async writes of threads before wgmma reads
        if TRANS_A:
            a = a_ring.index(stage).reshape([BK, BM]).slice(HALF * H, H, dim=1).permute((1, 0))
        else:
            a = a_ring.index(stage).reshape([BM, BK]).slice(HALF * H, H, dim=0)
        if TRANS_B:
            b = b_ring.index(stage).reshape([BN, BK]).slice(0, WIDE, dim=0).permute((1, 0))
        else:
            b = b_ring.index(stage).reshape([BK, BN]).slice(0, WIDE, dim=1)
        acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=step > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    if LOW:
        low_a, low_b, low_tiles = low
        K: gl.constexpr = low_a.block_type.shape[2]
        for _ in range(low_tiles):
            mbarrier.wait(full.index(stage), phase)
            a_box = a_ring.index(stage)._reinterpret(a_ring.dtype, low_a.block_type.shape, low_a.layout)
            b_box = b_ring.index(stage)._reinterpret(b_ring.dtype, low_b.block_type.shape, low_b.layout)
            a = a_box.reshape([BM, K]).slice(HALF * H, H, dim=0)
            if TRANS_B:
                b = b_box.reshape([BN, K]).slice(0, WIDE, dim=0).permute((1, 0))
            else:
                b = b_box.reshape([K, BN]).slice(0, WIDE, dim=1)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(_before(stage, STAGES)))
            stage, phase = next_stage(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(stage, STAGES)))
    return acc, stage, phase


@gluon.jit
def skip(ring, stage, phase, steps, STAGES: gl.constexpr):
    """Releases the stages of a half tile that has no rows."""
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
def _write(acc, desc, place, column, buffers, SPLIT: gl.constexpr):
    """A half tile in SPLIT parts of columns, which take turns at the buffers."""
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
def multiply_and_store(
    ring, stage, phase, steps, desc, place, column, buffers,
    HALF: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, GATHERED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    WIDE: gl.constexpr, low=None, LOW: gl.constexpr = False,
):  # fmt: skip
    """Multiplies and stores the first WIDE columns of a half tile: of the matrix's last one, those that are there."""
    acc, stage, phase = multiply(
        ring, stage, phase, steps, HALF, TRANS_A, TRANS_B, GATHERED, BM, BN, BK, STAGES, WIDE, low, LOW
    )
    PART: gl.constexpr = BN // SPLIT
    if WIDE >= PART:
        _write(acc, desc, place, column, buffers, WIDE // PART)
    else:  # what else is in the buffer lies past the matrix's last column, where the map clips
        tma.store_wait(0)
        buffers.index(0).reshape([BM // 2, PART]).slice(0, WIDE, dim=1).store(acc.to(desc.dtype))
        fence_async_shared()
        c0, c1, c2, row = place
        tma.async_copy_shared_to_global(desc, [c0, c1, c2, row, column], buffers.index(0))
    return stage, phase


@gluon.jit
def store_gated(acc, z_desc, h_desc, place, column, buffers, swapped, ACT: gl.constexpr):
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
def rings(a_desc, b_desc, STAGES: gl.constexpr, GATHERED: gl.constexpr):
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
def store_buffers(desc, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005
